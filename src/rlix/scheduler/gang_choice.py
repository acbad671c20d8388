"""On which of its choices a gang is to run: now at home, now elsewhere, now on fewer devices, or later at home.

All are priced in GPU-seconds. A second that the gang's job loses costs what the job is due in it, an equal share of
the pool: `share * (wait + move + work / width)`. Rollouts that are stopped cost their bundles' loads, `_PER_LOAD`
times. So a gang is wide while the pool is wide, or while nobody is stopped for it; where jobs are as many as GPUs it
runs on few. On any choice but the first, which is where the gang last was, its state has to move: for as long as its
client says, in which its devices do nothing. Such a choice must be cheaper by `_WORTH_IT`, too.
How long a phase takes is not known at its first time. It then runs where nobody is at work, as wide as it is if that
is to be had. A gang whose end is not known is not waited for where another choice fits.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rlix.protocol.messages import Lease
from rlix.protocol.types import Phase
from rlix.scheduler.snapshot import GangRequest, Snapshot

_WORTH_IT = 0.85
_SOME_LOAD_S, _MOST_LOAD_S = 6.0, 60.0  # for a job that has not learnt its own yet; whatever a job says
_PER_LOAD = 4.0
"""What stopping a bundle costs, in loads of it: it drains, waits for a place, loads and rebuilds its contexts; the
gang waits for the drain on all its devices. Measured by simulation: of 2, 3, 4, 6 and 10, 4 gave the most steps."""


@dataclass(frozen=True)
class GangChoice:
    """`running`: device -> the rollout lease on it that can be stopped. `free`, `running`, `reserved` are live."""

    snapshot: Snapshot
    free: set[int]
    running: Mapping[int, Lease]
    reserved: set[int]

    @cached_property
    def _load_s(self) -> dict[tuple[str, str], float]:
        """Of rollouts with demand."""
        rollouts = (r for r in self.snapshot.rollouts if r.demand.trajectories)
        return {(r.pipeline_id, r.cluster): min(r.demand.load_s or _SOME_LOAD_S, _MOST_LOAD_S) for r in rollouts}

    @cached_property
    def _share(self) -> float:
        """GPUs over jobs that have something to do."""
        jobs = {request.pipeline_id for request in self.snapshot.requests}
        jobs.update(pipeline_id for pipeline_id, _ in self._load_s)
        jobs.update(s.lease.pipeline_id for s in self.snapshot.leases if s.lease.phase is not Phase.ROLLOUT)
        return len(self.snapshot.devices) / max(1, len(jobs))

    @cached_property
    def _held_s(self) -> dict[int, float]:
        """How long a gang still has each device."""
        left = self.snapshot.gang_left_s
        gangs = (s.lease for s in self.snapshot.leases if s.lease.phase is not Phase.ROLLOUT)
        return {device: left.get(lease.epoch, math.inf) for lease in gangs for device in lease.devices}

    def chosen(self, request: GangRequest, choices: list[tuple[int, ...]]) -> tuple[int, ...] | None:
        """The devices to grant; None while the gang had better wait for the first of `choices`."""
        first, *others = choices
        fits = self._fits(first)
        if not others:
            return first if fits else None
        if not request.work_gpu_s:
            wide = [devices for devices in choices if len(devices) == len(first)]
            return self._idle(wide) or (first if fits else self._idle(choices))
        price, best = self._price(request, first), first if fits else None
        if not fits:
            price += self._share * self._wait_s(request, first)
        price *= _WORTH_IT
        for devices in others:
            if self._busy(request, devices, request.move_s) < price and self._fits(devices):
                other = self._price(request, devices, request.move_s)
                if other < price:
                    price, best = other, devices
        return best

    def _fits(self, devices: tuple[int, ...]) -> bool:
        return self.reserved.isdisjoint(devices) and all(d in self.free or d in self.running for d in devices)

    def _idle(self, choices: list[tuple[int, ...]]) -> tuple[int, ...] | None:
        """The first of these where nobody works."""
        return next((devices for devices in choices if self._fits(devices) and not any(self._stopped(devices))), None)

    def _stopped(self, devices: tuple[int, ...]) -> Iterable[Lease]:
        """The leases with demand on them."""
        leases = {id(lease): lease for device in devices if (lease := self.running.get(device)) is not None}
        return [lease for lease in leases.values() if (lease.pipeline_id, lease.cluster) in self._load_s]

    def _busy(self, request: GangRequest, devices: tuple[int, ...], move_s: float) -> float:
        """GPU-seconds that the gang's job loses while it runs there, and that its devices lose while they wait."""
        return self._share * (move_s + request.work_gpu_s / len(devices)) + move_s * len(devices)

    def _price(self, request: GangRequest, devices: tuple[int, ...], move_s: float = 0.0) -> float:
        """GPU-seconds that it costs to run there at once."""
        loads = (self._load_s[s.pipeline_id, s.cluster] * len(s.devices) for s in self._stopped(devices))
        return self._busy(request, devices, move_s) + _PER_LOAD * sum(loads)

    def _wait_s(self, request: GangRequest, devices: tuple[int, ...]) -> float:
        """Until the gangs there have ended. A guess: others that wait for them are as long as this one, and what else
        is in the way, such as rollouts that end, half as long."""
        alone = request.work_gpu_s / len(devices)
        held = max((self._held_s[device] for device in devices if device in self._held_s), default=0.5 * alone)
        return held if self.reserved.isdisjoint(devices) else held + alone
