"""What the planner sees: one frozen picture of the pool. Only admitted pipelines appear in it."""

from dataclasses import dataclass

from rlix.protocol.messages import Demand, Device, LeaseStatus
from rlix.protocol.types import Phase


@dataclass(frozen=True, slots=True)
class GangRequest:
    """A cluster waits for exactly these devices. `id` grows with every request: it is the arrival order."""

    id: int
    pipeline_id: str
    cluster: str
    phase: Phase
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RolloutState:
    """A rollout cluster: where its replicas may sit and what it still has to do.

    `bundles[k]` are the device ids of replica k; bundles of one rollout are disjoint and equally large.
    `waited` is 0 while the rollout holds a bundle or needs none; otherwise it counts the demand reports of the whole
    pool since then. Reports are heartbeats, so this is the planner's measure of time: it has no clock.
    `gang_devices` are those the pipeline's other clusters will ask for once the rollout is over.
    """

    pipeline_id: str
    cluster: str
    bundles: tuple[tuple[int, ...], ...]
    demand: Demand
    waited: int = 0
    gang_devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one moment. The order of the four collections carries no meaning."""

    devices: tuple[Device, ...]
    requests: tuple[GangRequest, ...] = ()
    rollouts: tuple[RolloutState, ...] = ()
    leases: tuple[LeaseStatus, ...] = ()
