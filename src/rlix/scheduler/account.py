"""What the state keeps about one rollout cluster: its demand, its bundles, and what it has been given."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlix.protocol.messages import Demand
from rlix.scheduler.snapshot import Bundles, RolloutState

REMEMBERED_S = 600.0
"""How much a rollout is owed, or owes, from before it had no demand for a while: seconds of one bundle, at most."""


@dataclass(slots=True)
class Given:
    """A pipeline's account since it was `admitted`: GPU-seconds under leases, of gangs as of rollouts.

    `before_gpu_s`: what it is taken to have been given before.
    """

    admitted: float
    before_gpu_s: float
    _gpu_s: float = 0.0  # up to `_since`
    _devices: int = 0
    _since: float = 0.0

    def at(self, now: float) -> float:
        return self.before_gpu_s + self.used(now)

    def used(self, now: float) -> float:
        return self._gpu_s + self._devices * (now - self._since)

    def change(self, devices: int, now: float) -> None:
        """From now on it has so many devices more, or fewer."""
        self._gpu_s, self._since = self.used(now), now
        self._devices += devices


@dataclass(slots=True)
class Account:
    """A rollout cluster that has reported demand. `leases` are those not draining. Times are those of events.

    Service is accounted as fair queueing does (Demers et al. 1989): what a rollout is given while it has demand is
    added up; one that begins to have demand starts at the mean of the others, give or take `REMEMBERED_S`. So nobody
    saves up claims while he needs nothing, nor pays for what he used while nobody else had a use for it.
    """

    bundles: Bundles
    gang_devices: tuple[int, ...]
    demand: Demand = field(default_factory=lambda: Demand(0))
    leases: set[int] = field(default_factory=set)
    _waits_since: float | None = None  # has had demand but no bundle since then
    _holds_since: float | None = None  # has had demand and a bundle since then
    _gained_at: float = -math.inf  # was granted a bundle
    _served_gpu_s: float = 0.0  # up to `_served_at`
    _served_at: float = 0.0

    def seen(self, pipeline_id: str, cluster: str, given: Given, now: float) -> RolloutState:
        return RolloutState(
            pipeline_id,
            cluster,
            self.bundles,
            self.demand,
            0.0 if self._waits_since is None else now - self._waits_since,
            0.0 if self._holds_since is None else now - self._holds_since,
            self.served(now),
            given.used(now),
            now - given.admitted,
            gang_devices=self.gang_devices,
            gained_s=now - self._gained_at,
        )

    def served(self, now: float) -> float:
        """GPU-seconds of bundles granted while it had demand, from a start comparable to that of others."""
        if not self.demand.trajectories:
            return self._served_gpu_s
        return self._served_gpu_s + len(self.leases) * len(self.bundles[0]) * (now - self._served_at)

    def join(self, others: Iterable["Account"], now: float, remembered_s: float = 0.0) -> None:
        """Puts its service within so many seconds of one bundle of the mean of those that have demand."""
        self._settle(now)
        served = [other.served(now) for other in others if other.demand.trajectories and other is not self]
        if served:
            mean, margin = sum(served) / len(served), remembered_s * len(self.bundles[0])
            self._served_gpu_s = min(max(self._served_gpu_s, mean - margin), mean + margin)

    def admit(self, now: float) -> None:
        """What it waited for before admission does not count."""
        self._waits_since = None
        self._note(now)

    def report(self, demand: Demand, now: float) -> None:
        self._settle(now)
        self.demand = demand
        self._note(now)

    def grant(self, epoch: int, now: float) -> None:
        self._settle(now)
        self.leases.add(epoch)
        self._gained_at = now
        self._note(now)

    def leave(self, epoch: int, now: float) -> None:
        """The lease drains or ends."""
        self._settle(now)
        self.leases.discard(epoch)
        self._note(now)

    def _settle(self, now: float) -> None:
        self._served_gpu_s, self._served_at = self.served(now), now

    def _note(self, now: float) -> None:
        waits = self.demand.trajectories > 0 and not self.leases
        holds = self.demand.trajectories > 0 and bool(self.leases)
        self._waits_since = (now if self._waits_since is None else self._waits_since) if waits else None
        self._holds_since = (now if self._holds_since is None else self._holds_since) if holds else None
