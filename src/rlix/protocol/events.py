"""Events of the control plane's journal: its state is a fold over them, in order."""

from dataclasses import dataclass

from rlix.protocol.messages import Demand, Device, Lease, Registration, ReleaseReason
from rlix.protocol.types import Phase


@dataclass(frozen=True, slots=True)
class DevicesDiscovered:
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class PipelineAllocated:
    pipeline_id: str
    kind: str


@dataclass(frozen=True, slots=True)
class PipelineRegistered:
    registration: Registration


@dataclass(frozen=True, slots=True)
class PipelineAdmitted:
    pipeline_id: str


@dataclass(frozen=True, slots=True)
class PipelineUnregistered:
    """Ends the pipeline: its leases, requests and demand go with it."""

    pipeline_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GangRequested:
    """`request_id` grows with every request, so it is also the arrival order."""

    request_id: int
    pipeline_id: str
    cluster: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class GangCancelled:
    request_id: int


@dataclass(frozen=True, slots=True)
class DemandReported:
    pipeline_id: str
    cluster: str
    demand: Demand


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A gang (with the request it answers) or one rollout bundle. Pending while its devices drain."""

    lease: Lease
    request_id: int | None = None


@dataclass(frozen=True, slots=True)
class ShrinkStarted:
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """The devices of the lease are free; leases that waited for them and now have all become active."""

    epoch: int
    reason: ReleaseReason


Event = (
    DevicesDiscovered
    | PipelineAllocated
    | PipelineRegistered
    | PipelineAdmitted
    | PipelineUnregistered
    | GangRequested
    | GangCancelled
    | DemandReported
    | LeaseGranted
    | ShrinkStarted
    | LeaseReleased
)
