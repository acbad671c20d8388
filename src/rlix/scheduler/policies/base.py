"""The interface of a policy: how the devices that no gang needs are divided among the rollouts."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from rlix.scheduler.plan import Expand
from rlix.scheduler.snapshot import RolloutState


@dataclass(frozen=True, slots=True)
class Holding:
    """A rollout bundle that runs now and may be taken back. `rollout` is an index into `Pool.rollouts`."""

    epoch: int
    rollout: int
    bundle: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """What remains for the rollouts once the gangs have been served.

    A device is in `free`, is a key of `owner` (index into `holdings`), or is out of reach in this cycle.
    """

    rollouts: Sequence[RolloutState]  # sorted by (pipeline_id, cluster)
    holdings: Sequence[Holding]  # sorted by epoch
    free: Set[int]
    owner: Mapping[int, int]
    pinned: Sequence[int]  # per rollout: bundles granted but not running yet; they count and cannot be taken
    reserved: Set[int]  # devices some waiting gang will take as soon as it fits
    imminent: Set[int] = frozenset()  # those of them that wait for no other gang, only for rollouts that come or go


class Policy(Protocol):
    """Divides a pool. Pure: the same pool gives the same answer."""

    def divide(self, pool: Pool) -> Sequence[Expand]:
        """Name the bundles that are to grow: disjoint, on free or owned devices, of rollouts with demand.

        Holdings that overlap them are shrunk by the planner and all others stay, so a policy cannot stop work for
        nothing. An expand that names a bundle its rollout already holds keeps that bundle.
        """
        ...
