"""From what a job names to the loggers."""

from rlix.pipeline.loggers.base import Logger
from rlix.pipeline.loggers.mlflow import MlflowLogger
from rlix.pipeline.loggers.tensorboard import TensorBoardLogger
from rlix.pipeline.loggers.wandb import WandbLogger
from rlix.pipeline.spec.logging import LoggingSpec


def build_loggers(spec: LoggingSpec) -> list[Logger]:
    loggers: list[Logger] = [TensorBoardLogger()]
    if spec.wandb is not None:
        loggers.append(WandbLogger(spec.wandb))
    if spec.mlflow is not None:
        loggers.append(MlflowLogger(spec.mlflow))
    return loggers
