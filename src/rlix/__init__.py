"""RLix: many RL post-training jobs share one pool of GPUs as if each had the pool to itself.

Names are resolved on first use, so that importing rlix (as every control-plane process does) stays cheap: torch and
transformers are only loaded by the parts that need them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import device

    from rlix import nn, pipeline, protocol
    from rlix.control.client import JobClient
    from rlix.control.init import init, shutdown
    from rlix.control.program import attach
    from rlix.engine.inference.engine import InferenceEngine
    from rlix.engine.inference.turns import Turn, TurnError
    from rlix.engine.parallel import NeedParallel
    from rlix.engine.placement import pool_devices
    from rlix.engine.train.engine import TrainEngine
    from rlix.engine.weights.publication import TransferError
    from rlix.integrations.rllib.algorithm import rllib
    from rlix.pipeline.jobs.launch import launch
    from rlix.pipeline.spec.job import JobSpec, load_job
    from rlix.protocol.errors import (
        DeadlockError,
        DeviceBusyError,
        NotResidentError,
        PipelineGoneError,
        PlanError,
        RlixError,
        SpecError,
        StaleEpochError,
        WaitTimeoutError,
        WeightSyncError,
        WorkerError,
    )
    from rlix.protocol.types import Phase

_ERRORS = (
    "DeadlockError",
    "DeviceBusyError",
    "NotResidentError",
    "PipelineGoneError",
    "PlanError",
    "RlixError",
    "SpecError",
    "StaleEpochError",
    "WaitTimeoutError",
    "WeightSyncError",
    "WorkerError",
)
_LAZY = {
    "init": "rlix.control.init",
    "shutdown": "rlix.control.init",
    "JobClient": "rlix.control.client",
    "attach": "rlix.control.program",
    "InferenceEngine": "rlix.engine.inference.engine",
    "NeedParallel": "rlix.engine.parallel",
    "TrainEngine": "rlix.engine.train.engine",
    "device": "torch",
    "pool_devices": "rlix.engine.placement",
    "JobSpec": "rlix.pipeline.spec.job",
    "launch": "rlix.pipeline.jobs.launch",
    "rllib": "rlix.integrations.rllib.algorithm",
    "load_job": "rlix.pipeline.spec.job",
    "Phase": "rlix.protocol.types",
    "Turn": "rlix.engine.inference.turns",
    "TurnError": "rlix.engine.inference.turns",
    "TransferError": "rlix.engine.weights.publication",
} | dict.fromkeys(_ERRORS, "rlix.protocol.errors")
_MODULES = ("nn", "pipeline", "protocol")
_OLDER_NAMES = {
    "RLiteInferenceEngine": "InferenceEngine",
    "RliteInferenceEngine": "InferenceEngine",
    "RLiteTrainEngine": "TrainEngine",
    "RliteTrainEngine": "TrainEngine",
}

__all__ = [
    "DeadlockError",
    "DeviceBusyError",
    "InferenceEngine",
    "JobClient",
    "JobSpec",
    "NeedParallel",
    "NotResidentError",
    "Phase",
    "PipelineGoneError",
    "PlanError",
    "RlixError",
    "SpecError",
    "StaleEpochError",
    "TrainEngine",
    "TransferError",
    "Turn",
    "TurnError",
    "WaitTimeoutError",
    "WeightSyncError",
    "WorkerError",
    "__version__",
    "attach",
    "device",
    "init",
    "launch",
    "load_job",
    "nn",
    "pipeline",
    "pool_devices",
    "protocol",
    "rllib",
    "shutdown",
]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rlix")
    except PackageNotFoundError:  # running from a source tree that was never installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    name = _OLDER_NAMES.get(name, name)
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _MODULES:
        return import_module(f"rlix.{name}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'rlix' has no attribute {name!r}")
