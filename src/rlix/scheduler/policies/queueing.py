"""Who goes first among rollouts whose next bundle is worth the same, and who is owed a bundle by whom."""

from rlix.scheduler.policies.base import Pool
from rlix.scheduler.snapshot import RolloutState

Order = tuple[float, ...]

_LEAST_TURN_S, _MOST_TURN_S = 30.0, 600.0  # whatever a job says of its loads


class Queueing:
    """The rules 2 and 4 of the policy `rlix` for one pool. Rollouts are indices into `pool.rollouts`.

    `equal_share`: GPUs in reach over rollouts with demand. `lag[i]`: GPU-seconds that rollout i was given less than
    the mean of those with demand; what the control plane measured, whatever the jobs say. `owed` and `owing`: by half
    a margin less, or more. `turn_s[i]`: how long somebody else keeps his only bundle, at least, before it goes to i.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        starving_s: float,
        turn_s: float,
        turn_loads: float,
        near_s: float,
        guard: float,
        slack: float,
    ) -> None:
        self.pool, self.rollouts = pool, pool.rollouts
        self.starving_s, self.near_s, self.guard = starving_s, near_s, guard
        demanding = [r for r in self.rollouts if r.demand.trajectories]
        self.equal_share = len(pool.free | pool.owner.keys()) / max(1, len(demanding))
        mean_gpu_s = sum(r.served_gpu_s for r in demanding) / max(1, len(demanding))
        self.lag = [mean_gpu_s - r.served_gpu_s if r.demand.trajectories else 0.0 for r in self.rollouts]
        self.turn_s = [
            min(max(turn_loads * r.demand.load_s, _LEAST_TURN_S), _MOST_TURN_S) if r.demand.load_s else turn_s
            for r in self.rollouts
        ]
        self.margin_gpu_s = [
            seconds * (len(r.bundles[0]) if r.bundles else 1) + slack * r.used_gpu_s
            for seconds, r in zip(self.turn_s, self.rollouts, strict=True)
        ]
        self.owed = [lag > margin / 2 for lag, margin in zip(self.lag, self.margin_gpu_s, strict=True)]
        self.owing = [lag < -margin / 2 for lag, margin in zip(self.lag, self.margin_gpu_s, strict=True)]
        by_debt = sorted(range(len(self.lag)), key=lambda j: self.lag[j])
        self._below_mean = [j for j in by_debt if self.lag[j] < 0.0]
        self._owing = [j for j in by_debt if self.owing[j]]
        told = [r.demand.left_gpu_s for r in demanding if r.demand.left_gpu_s > 0.0]
        self.unknown_left_gpu_s = sum(told) / len(told) if told else 0.0
        self.ahead_gpu_s: dict[tuple[int, ...], float] = {}  # per set of gang devices
        for rollout in self.rollouts:
            ahead = self.ahead_gpu_s.get(rollout.gang_devices, 0.0)
            self.ahead_gpu_s[rollout.gang_devices] = ahead + self._left(rollout)
        self.pressure = self._pressures()
        self.busy = {devices: not all(map(self._in_reach, devices)) for devices in self.ahead_gpu_s}

    def orders(self) -> list[Order]:
        return [self._order(i, rollout) for i, rollout in enumerate(self.rollouts)]

    def owes(self, j: int, i: int) -> bool:
        """Whether rollout j was given so much more than i that a bundle may pass from j to i for it alone."""
        return self.lag[j] < 0.0 < self.lag[i] and (self.owing[j] or self.owed[i])

    def debtors(self, i: int) -> list[int]:
        """Those who owe rollout i, who owes most first."""
        if self.lag[i] <= 0.0:
            return []
        return self._below_mean if self.owed[i] else self._owing

    def _order(self, i: int, rollout: RolloutState) -> Order:
        if rollout.waited_s >= self.starving_s:
            return 0.0, -rollout.waited_s, 0.0
        if self.owed[i]:
            return 1.0, -self.lag[i], 0.0
        if self.owing[i]:
            return 5.0, -self.lag[i], 0.0
        demand = rollout.demand
        share = rollout.used_gpu_s / max(rollout.age_s, 1.0)
        if rollout.age_s and share < self.guard * self.equal_share:
            return 2.0, share, 0.0
        ends_s = demand.floor_s + demand.work_s
        near = 0.0 < ends_s < self.near_s and self.busy[rollout.gang_devices]
        return (3.0 if near else 4.0), self._left(rollout) / self.pressure[rollout.gang_devices] ** 2, 0.0

    def _left(self, rollout: RolloutState) -> float:
        """GPU-seconds until its job's end as far as it says; whoever does not say is taken for average."""
        if rollout.demand.left_gpu_s > 0.0:
            return rollout.demand.left_gpu_s
        return self.unknown_left_gpu_s if rollout.demand.trajectories else 0.0

    def _pressures(self) -> dict[tuple[int, ...], float]:
        """Work ahead of each set's most wanted device, as a share of the pool's most wanted one, at least 0.1."""
        per_device: dict[int, float] = {}
        for devices, ahead in self.ahead_gpu_s.items():
            for device in devices:
                per_device[device] = per_device.get(device, 0.0) + ahead
        most = max(per_device.values(), default=0.0) or 1.0
        return {
            devices: max(0.1, max((per_device[d] for d in devices), default=0.0) / most) for devices in self.ahead_gpu_s
        }

    def _in_reach(self, device: int) -> bool:
        return device in self.pool.free or device in self.pool.owner
