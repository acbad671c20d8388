"""Frozen messages that jobs and the control plane exchange."""

from dataclasses import dataclass
from enum import StrEnum

from rlix.protocol.types import Phase


class DeviceKind(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"  # a virtual GPU: a logical slot backed by the CPU


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or a virtual one. `id` is global and dense (0..N-1); `index` is its number on its node."""

    id: int
    node_id: str
    node_ip: str
    index: int
    kind: DeviceKind


@dataclass(frozen=True, slots=True)
class Cluster:
    """A named worker set of a pipeline and the devices it may use, in rank order."""

    name: str
    tensor_parallel_size: int
    devices: tuple[int, ...]

    @property
    def bundles(self) -> tuple[tuple[int, ...], ...]:
        """Consecutive groups of `tensor_parallel_size` devices: one per data-parallel rank."""
        size = self.tensor_parallel_size
        return tuple(self.devices[i : i + size] for i in range(0, len(self.devices), size))


@dataclass(frozen=True, slots=True)
class Registration:
    """What a pipeline declares before it is admitted."""

    pipeline_id: str
    ray_namespace: str
    clusters: tuple[Cluster, ...]

    def cluster(self, name: str) -> Cluster:
        for cluster in self.clusters:
            if cluster.name == name:
                return cluster
        known = ", ".join(c.name for c in self.clusters)
        raise KeyError(f"pipeline {self.pipeline_id!r} has no cluster {name!r}; it registered: {known}")


@dataclass(frozen=True, slots=True)
class Demand:
    """What a rollout still has to do. Zero trajectories: it needs nothing and gives way first."""

    trajectories: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one pipeline to keep bytes on `devices` during `phase`.

    `epoch` is unique and grows with every grant: it names the lease and fences off stale holders.
    `bundle` is the data-parallel rank for a rollout lease, None for a gang.
    """

    epoch: int
    pipeline_id: str
    cluster: str
    phase: Phase
    devices: tuple[int, ...]
    bundle: int | None = None


class LeaseState(StrEnum):
    PENDING = "pending"  # granted, waits for the leases on its devices to drain
    ACTIVE = "active"
    DRAINING = "draining"  # told to shrink, not yet acknowledged


class ReleaseReason(StrEnum):
    RELEASED = "released"
    SHRUNK = "shrunk"
    KILLED = "killed"  # missed its shrink deadline
    UNREGISTERED = "unregistered"


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    lease: Lease
    state: LeaseState


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    pipeline_id: str
    admitted: bool
    clusters: tuple[Cluster, ...]
    waiting: tuple[str, ...]  # clusters with a gang request that is not granted yet
    demand: Demand


@dataclass(frozen=True, slots=True)
class ControlStatus:
    """What the control plane shows to a terminal view or a script."""

    devices: tuple[Device, ...]
    pipelines: tuple[PipelineStatus, ...]
    leases: tuple[LeaseStatus, ...]
    journal_length: int
