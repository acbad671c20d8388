"""What host memory a job is said to need before one of its kind was measured: a statement from the sizes of files."""

import contextlib
import hashlib
from pathlib import Path

from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.messages import StartNeed
from rlix.protocol.types import ClusterName

PROCESS = 250_000_000
"""Bytes of a process without a model, most of them libraries."""
_STATE = 8
"""Weights, gradients and two moments in float32, where the file has the weights in bfloat16."""
_BESIDE = frozenset(
    {"name", "seed", "steps", "logging", "checkpoint", "evaluation", "clusters", "plan", "declared_speed"}
)


def start_need(spec: JobSpec) -> StartNeed:
    """A trained model's state is spread over its cluster's processes; a rollout's replica has the weights."""
    weights, stated = _weights(spec), {"": PROCESS}
    for name, cluster in spec.clusters_in_use.items():
        ranks = cluster.count or cluster.unit
        rollout = name == ClusterName.ACTOR_INFER
        stated[name] = PROCESS + (weights // cluster.unit if rollout else _STATE * weights // ranks)
    return StartNeed(_kind(spec), stated)


def _kind(spec: JobSpec) -> str:
    """The same for jobs that do the same, however often and for how long."""
    return hashlib.sha256(spec.model_dump_json(exclude=set(_BESIDE)).encode()).hexdigest()[:16]


def _weights(spec: JobSpec) -> int:
    """Bytes of the model's files; 0 of the built-in one and of one that is not in a folder here."""
    folder = Path(getattr(spec.model, "path", ""))
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
    return 0
