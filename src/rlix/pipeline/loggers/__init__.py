"""Where metrics go besides the run folder: TensorBoard always, others when a job names them."""

from rlix.pipeline.loggers.base import Logger, Run
from rlix.pipeline.loggers.choice import build_loggers
from rlix.pipeline.loggers.outlets import Loggers

__all__ = ["Logger", "Loggers", "Run", "build_loggers"]
