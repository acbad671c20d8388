"""What a user trains: pipelines execute a job's algorithm in single-process style, on leased devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlix.pipeline.base import Pipeline
    from rlix.pipeline.jobs.coordinator import PipelineCoordinator
    from rlix.pipeline.trainer import Trainer
    from rlix.pipeline.trainer import Trainer as FullFinetunePipeline

_LAZY = {
    "Pipeline": "rlix.pipeline.base:Pipeline",
    "PipelineCoordinator": "rlix.pipeline.jobs.coordinator:PipelineCoordinator",
    "Trainer": "rlix.pipeline.trainer:Trainer",
    "FullFinetunePipeline": "rlix.pipeline.trainer:Trainer",
}

__all__ = ["FullFinetunePipeline", "Pipeline", "PipelineCoordinator", "Trainer"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, found = _LAZY[name].partition(":")
        return getattr(import_module(module), found)
    raise AttributeError(f"module 'rlix.pipeline' has no attribute {name!r}")
