"""What the planner sees: one frozen picture of the pool. Only admitted pipelines appear in it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlix.protocol.messages import Demand, Device, LeaseStatus, Process
from rlix.protocol.types import Phase

GANG_PATIENCE_S = 120.0
"""How long a gang waits, at most, before what its job was given counts for more than its phase."""


class Bundles(tuple[tuple[int, ...], ...]):
    """A placement that knows its way back: an ordinary tuple of bundles which keeps what is derived from it."""

    @cached_property
    def at(self) -> Mapping[int, int]:
        """Device -> the number of the bundle it belongs to."""
        return {device: number for number, devices in enumerate(self) for device in devices}


@dataclass(frozen=True, slots=True)
class GangRequest:
    """A cluster waits for exactly these devices, or all of one of the alternatives.

    `id` grows with every request: it is the arrival order. `devices` are where the cluster last was, if it ever was.
    Those of an `exact` request are what was asked for, which may be a part of the cluster's, and its only choice.
    `key`, `holder`, `holding`, `longest_s` and `until` are the client's: see `GangRequested`. `work_gpu_s` are the
    GPU-seconds that this phase of the cluster took the last time, as far as is remembered; 0: not known. `move_s`: what
    it takes its state from `devices` to an alternative. `asked_at`: seconds, on the clock of `Snapshot.now`.
    """

    id: int
    pipeline_id: str
    cluster: str
    phase: Phase
    devices: tuple[int, ...]
    alternatives: tuple[tuple[int, ...], ...] = ()
    key: str = ""
    holder: Process | None = None
    holding: tuple[int, ...] = ()
    longest_s: float | None = None
    exact: bool = False
    until: float | None = None
    work_gpu_s: float = field(default=0.0, compare=False)
    asked_at: float = field(default=0.0, compare=False)
    move_s: float = 0.0

    @property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        return (self.devices, *self.alternatives)


@dataclass(frozen=True, slots=True)
class RolloutState:
    """A rollout cluster: where its replicas may sit and what it still has to do.

    `bundles[k]` are the device ids of replica k; bundles of one rollout are disjoint and equally large.
    `waited_s`: seconds since the rollout has demand and no bundle; 0 while it holds one or needs none. `held_s`:
    seconds since it has demand and a bundle, else 0. `gained_s`: seconds since it was last granted one, infinite where
    it never was. `served_gpu_s`: GPU-seconds of bundles granted to it while it had demand, from a start that makes it
    comparable to other rollouts with demand (see `Account`).
    `used_gpu_s` are the GPU-seconds its pipeline has had under leases, `age_s` the seconds since it was admitted: what
    the control plane measures, while `demand` is what the job says.
    `gang_devices` are those the pipeline's other clusters will ask for once the rollout is over; `gang_expected`: any
    moment now, because the rollout or another gang of the pipeline has just ended.
    """

    pipeline_id: str
    cluster: str
    bundles: tuple[tuple[int, ...], ...]
    demand: Demand
    waited_s: float = 0.0
    held_s: float = 0.0
    served_gpu_s: float = 0.0
    used_gpu_s: float = 0.0
    age_s: float = 0.0
    gang_devices: tuple[int, ...] = ()
    gang_expected: bool = False
    gained_s: float = math.inf


def bundle_at(bundles: tuple[tuple[int, ...], ...]) -> Mapping[int, int]:
    """Device -> the number of the bundle it belongs to; costs nothing for a placement that the state keeps."""
    return bundles.at if isinstance(bundles, Bundles) else Bundles(bundles).at


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at the moment `now`, in seconds. The order of the four collections carries no meaning.

    `given_gpu_s`: the account of each pipeline that waits for a gang, GPU-seconds under leases of any phase.
    `gang_left_s`: how long a gang still keeps its devices, by epoch, where its phase is known from the last time.
    """

    devices: tuple[Device, ...]
    requests: tuple[GangRequest, ...] = ()
    rollouts: tuple[RolloutState, ...] = ()
    leases: tuple[LeaseStatus, ...] = ()
    now: float = 0.0
    given_gpu_s: Mapping[str, float] = field(default_factory=dict)
    gang_left_s: Mapping[int, float] = field(default_factory=dict)
