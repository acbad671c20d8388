"""Events of the control plane's journal: its state is a fold over them, in order."""

from dataclasses import dataclass

from rlix.protocol.messages import Demand, Device, Lease, LeaseStatus, Process, Registration, ReleaseReason
from rlix.protocol.types import Phase


@dataclass(frozen=True, slots=True)
class DevicesDiscovered:
    """`draining`: the nodes that get no work: their devices leave the pool as they become free."""

    devices: tuple[Device, ...]
    draining: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodesCordoned:
    """All nodes that a person has taken out of service, by id."""

    nodes: tuple[str, ...]


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
class HoldersNamed:
    """The processes that keep bytes under the leases of a cluster, by rank; of a rollout, a rank is a bundle.

    Cluster "" is the pipeline's own program: the process whose death ends the pipeline. Cluster `LAUNCHER` is who
    starts that: its death ends a pipeline that has no program yet.
    """

    pipeline_id: str
    cluster: str
    processes: tuple[tuple[int, Process], ...]


@dataclass(frozen=True, slots=True)
class PipelineEnding:
    """Takes requests and demand with it; the pipeline's leases are on their way out and end one by one.

    `spare`: the process that says so, which is not ended with the others.
    """

    pipeline_id: str
    reason: str
    spare: Process | None = None


@dataclass(frozen=True, slots=True)
class PipelineUnregistered:
    """Forgets a pipeline that holds no lease any more."""

    pipeline_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GangRequested:
    """`request_id` grows with every request, so it is also the arrival order.

    `key` is the client's own name for the request, by which it may ask again; `holder` is the process that asks, and
    `holding` are the epochs that it keeps until this request is granted. `longest_s`: after so many seconds with the
    devices the lease is ended, whatever its holder does. `until`: unix seconds at which its caller waits no longer.

    An `exact` request is for the devices `first`, which may be a part of the cluster's. Of another one they are where
    the gang's state lies, as its client says, or in a compacted journal which of the choices it waits for. `move_s`:
    what it takes the state to any other. `waited_s`: in a compacted journal, how long it had waited by then.
    """

    request_id: int
    pipeline_id: str
    cluster: str
    phase: Phase
    key: str = ""
    holder: Process | None = None
    holding: tuple[int, ...] = ()
    longest_s: float | None = None
    first: tuple[int, ...] = ()
    exact: bool = False
    until: float | None = None
    move_s: float = 0.0
    waited_s: float = 0.0


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
class DrainStarted:
    """The lease is on its way out: its holder was told, or is being ended."""

    epoch: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GrantRevoked:
    """A pending lease will not become active soon: a gang's request goes back to its place in the queue."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseQuarantined:
    """The devices cannot be given on: somebody may still have bytes there. `reason` says who, for people."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class DevicesReleased:
    """Some devices of a gang's active lease are free; the lease keeps the others, and its epoch."""

    epoch: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """The devices of the lease are free; leases that waited for them and now have all become active."""

    epoch: int
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class LeaseKept:
    """In a compacted journal: a lease as it stands, and the request that it answers while it is pending."""

    status: LeaseStatus
    answers: GangRequested | None = None


@dataclass(frozen=True, slots=True)
class CountersKept:
    """Epochs, request ids, device ids and pipeline numbers only grow: what a compacted journal must not forget, and a
    new one must learn."""

    last_epoch: int
    last_request: int
    last_device: int
    allocated: int


Event = (
    DevicesDiscovered
    | NodesCordoned
    | PipelineAllocated
    | PipelineRegistered
    | PipelineAdmitted
    | HoldersNamed
    | PipelineEnding
    | PipelineUnregistered
    | GangRequested
    | GangCancelled
    | DemandReported
    | LeaseGranted
    | DrainStarted
    | GrantRevoked
    | LeaseQuarantined
    | DevicesReleased
    | LeaseReleased
    | LeaseKept
    | CountersKept
)
