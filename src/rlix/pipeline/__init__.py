"""What a user trains: pipelines execute a job's algorithm in single-process style, on leased devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlix.pipeline.base import Pipeline
    from rlix.pipeline.full_finetune import FullFinetunePipeline
    from rlix.pipeline.jobs.coordinator import PipelineCoordinator

_LAZY = {
    "Pipeline": "rlix.pipeline.base",
    "PipelineCoordinator": "rlix.pipeline.jobs.coordinator",
    "FullFinetunePipeline": "rlix.pipeline.full_finetune",
}

__all__ = ["FullFinetunePipeline", "Pipeline", "PipelineCoordinator"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rlix.pipeline' has no attribute {name!r}")
