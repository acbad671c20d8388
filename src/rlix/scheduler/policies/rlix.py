"""The default policy: narrow when the pool is full, wide when not, switching only when it pays.

What a bundle is worth. Decoding streams the weights once per step whatever the batch, so k bundles are less than k
times as fast as one: with trajectories counted in knees, `pace(k) = step(batch) / step(batch / k)` for a step that
costs `max(1, b) + slope * b` (the roofline; Williams et al. 2009). One bundle is worth 1, the next as much of a GPU
as `pace(k+1) - pace(k)`: near 1 while the batch is far above the knee, near 0 in a tail.

1. Everybody's first bundle comes before anybody's second. Further ones go where they are worth most, which is optimal
   for concave curves (Fox 1966): wide only where GPUs would idle.
2. Equals are served in this order (`Queueing`). First who has waited `starving_s` for a first bundle, then who is owed
   service (rule 4), then those whose job had less than `guard` of an equal share so far, poorest first (max-min
   fairness). Then those about to end whose gang's devices are busy with gangs: the next gang follows at once. Then the
   job with the least left to do (SRPT, Schrage 1968; for concave speed-up: Berg et al., heSRPT, 2020), weighted by the
   square of the work ahead of its gang's devices: the longest queue ends last and must not run dry (Graham 1969). Who
   does not say what is left counts as average. Last come those that were given more than their part.
3. A held bundle moves only if what that adds, over the time it may last, is more than the GPU-seconds a switch costs.
   Without demand a bundle is worth nothing to its rollout, which keeps it warm until anybody has a use for it. A tail's
   last bundles are worth little, so tails are narrowed first.
4. What jobs say decides within bounds; beyond them what they were given decides, as measured. A rollout is owed service
   when it had less than the mean by half a margin, and owes when it had more: a turn of `turn_loads` loads, so that
   taking turns costs at most a twentieth, and `slack` of all that its job used, which keeps equals within a tenth. It
   may then claim what it can use well, up to an equal share, from whoever had more than the mean; and of who owes,
   everybody who had less may. Nobody with demand waits long: after
   `patience_s` it may take anybody's second bundle, after `starving_s` the only one of who has had a turn.
   What is due to a rollout (a bundle of its equal share that it uses well) is taken only for what is due to another
   that had no more, and who was given a bundle keeps what it has until that has paid for its load. So at any one moment
   each exchange raises what is due to those who had less, or else what all bundles are worth: none is ever undone.
5. A rollout sits where its own gang will come, if it can: the gang then ends no other job's rollout. Devices that a
   gang will take are used last, soonest last of all.
6. No bundle is loaded where a job is between two gangs, or where a gang waits for nothing but rollouts to drain. Where
   a gang is merely foreseen, bundles are loaded all the same: the devices would idle, and forecasts err.
"""

import heapq
import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlix.scheduler.plan import Expand
from rlix.scheduler.policies.base import Pool
from rlix.scheduler.policies.queueing import Order, Queueing
from rlix.scheduler.snapshot import RolloutState, bundle_at

_SOME_KNEE, _SOME_LOAD_S = 64.0, 6.0  # for a job that has not learnt its own yet
_ANYTHING = 1e-9  # GPUs: above the nothing that an unused bundle is worth
_A_GPU_WELL_USED = 0.5  # GPUs: what a bundle must be worth to be claimed for fairness alone
_FIRST = 2.0  # GPUs: a first bundle, to who holds it: more than any other is worth to anybody
_BUT_A_FIRST = 1.5  # GPUs: any bundle that is not somebody's first
_LEAST_PAID_S, _MOST_PAID_S = 5.0, 60.0  # whatever a job says of its loads

Offer = tuple[float, float, int, int]


@dataclass(frozen=True, slots=True)
class Rlix:
    """`payback`: GPU-seconds that a switch must win per second that a load takes: the load itself, and about as much
    for the drain and for rebuilding contexts. `dwell_s`: how long a change is trusted to last; `near_s`: how far ahead
    the end of a rollout is foreseen. Both, and `patience_s` and `starving_s`, were chosen by simulation, on other seeds
    than are reported; results are flat about them. `slope`: how much a decode step grows per knee of batch by reading
    key-value caches, over the weights' own time: `kv_us * knee / token_ms` = 0.38 of the simulator's 7B model. It only
    shapes the curve below the knee; a job says nothing of it.
    """

    payback: float = 2.0
    dwell_s: float = 30.0
    near_s: float = 60.0
    guard: float = 0.8
    slope: float = 0.35
    patience_s: float = 20.0
    starving_s: float = 600.0
    turn_s: float = 120.0
    turn_loads: float = 20.0
    slack: float = 0.1

    def divide(self, pool: Pool) -> Sequence[Expand]:
        return _Division(pool, self).run()


rlix = Rlix()


@dataclass(slots=True, eq=False)
class _Seat:
    """A bundle that somebody holds, or is about to."""

    rollout: int
    bundle: int
    devices: tuple[int, ...]
    new: bool


class _Placement:
    """Rollouts with the same bundles share the list of those that were free, best last."""

    def __init__(self, bundles: tuple[tuple[int, ...], ...], division: "_Division") -> None:
        free, due_s, reserved = division.free, division.due_s, division.pool.reserved
        self.bundle_at = at = bundle_at(bundles)
        within = {at[device] for device in at.keys() & free} if len(free) < len(at) else range(len(bundles))
        usable = [number for number in sorted(within, reverse=True) if free.issuperset(bundles[number])]
        wanted = {at[device] for device in at.keys() & division.wanted}
        second = [number for number in usable if number in wanted]
        second.sort(key=lambda k: (min(due_s.get(d, math.inf) for d in bundles[k]), reserved.isdisjoint(bundles[k])))
        self.free = second + ([number for number in usable if number not in wanted] if second else usable)
        # Rule 6: bundles that a gang is about to take.
        self.due = {at[device] for device, seconds in due_s.items() if seconds <= 0.0 and device in at}
        self.offers: list[Offer] | None = None  # ascending: what those who hold these devices would lose
        self.kept: set[int] = set()  # bundles that are out of reach for whoever has one


class _Division:
    """One division. Rollouts are indices into `pool.rollouts`; `count` is how many bundles each has by now."""

    def __init__(self, pool: Pool, policy: Rlix) -> None:
        self.pool, self.policy, self.rollouts = pool, policy, pool.rollouts
        self.free = set(pool.free)
        self.count = list(pool.pinned)
        self.seats: list[dict[int, _Seat]] = [{} for _ in self.rollouts]
        self.at: dict[int, _Seat] = {}
        for holding in pool.holdings:
            seat = _Seat(holding.rollout, holding.bundle, holding.devices, new=False)
            self.seats[seat.rollout][seat.bundle] = seat
            self.count[seat.rollout] += 1
            for device in seat.devices:
                self.at[device] = seat
        self.most = [min(r.demand.trajectories, len(r.bundles)) for r in self.rollouts]
        self.spare = any(c > m and s for c, m, s in zip(self.count, self.most, self.seats, strict=True))
        self.width = [len(r.bundles[0]) if r.bundles else 1 for r in self.rollouts]
        self.batch = [r.demand.trajectories / (r.demand.knee or _SOME_KNEE) for r in self.rollouts]
        self.gained = [r.gained_s < self._paid_s(r) for r in self.rollouts]
        self.queueing = Queueing(
            pool,
            starving_s=policy.starving_s,
            turn_s=policy.turn_s,
            turn_loads=policy.turn_loads,
            near_s=policy.near_s,
            guard=policy.guard,
            slack=policy.slack,
        )
        self.order = self.queueing.orders()
        self.shared: dict[int, _Placement] = {}  # by identity of the bundles
        self.placements: list[_Placement | None] = [None] * len(self.rollouts)
        self.due_s = self._gangs_due()
        self.wanted = self.due_s.keys() | pool.reserved  # devices that some gang will take

    def _gangs_due(self) -> dict[int, float]:
        """Device -> seconds until a gang will ask for it, as far as that can be foreseen."""
        due = dict.fromkeys(self.pool.imminent, 0.0)
        for rollout, count in zip(self.rollouts, self.count, strict=True):
            demand = rollout.demand
            if rollout.gang_expected:
                due.update(dict.fromkeys(rollout.gang_devices, 0.0))
            elif count and 0.0 < (ends_s := demand.floor_s + demand.work_s / count) < self.policy.near_s:
                for device in rollout.gang_devices:
                    due[device] = min(due.get(device, ends_s), ends_s)
        return due

    def run(self) -> list[Expand]:
        """Serve the best bid, again and again; a rollout that finds no bundle drops out."""
        bids = [bid for i in range(len(self.rollouts)) if (bid := self._bid(i)) is not None]
        heapq.heapify(bids)
        while bids:
            i = bids[0][2]
            bid = self._bid(i) if self._serve(i) else None
            if bid is None:
                heapq.heappop(bids)
            else:
                heapq.heapreplace(bids, bid)
        return [
            Expand(rollout.pipeline_id, rollout.cluster, seat.bundle)
            for rollout, seats in zip(self.rollouts, self.seats, strict=True)
            for seat in seats.values()
            if seat.new
        ]

    def gain(self, i: int, count: int) -> float:
        """What bundle number `count + 1` is worth to rollout i, in GPUs."""
        if count >= self.most[i]:
            return 0.0
        if count == 0:
            return 1.0
        batch, slope = self.batch[i], self.policy.slope
        alone, now, then = batch, batch / count, batch / (count + 1)
        step = (alone if alone > 1.0 else 1.0) + slope * alone
        return step / ((then if then > 1.0 else 1.0) + slope * then) - step / (
            (now if now > 1.0 else 1.0) + slope * now
        )

    def _bid(self, i: int) -> tuple[float, Order, int] | None:
        """Rollout i's place in the queue for one more bundle, in tenths of a GPU; None when that is worth nothing."""
        count = self.count[i]
        gain = self.gain(i, count)
        if gain <= 0.0:
            return None
        if count == 0:
            return -math.inf, self.order[i], i
        if self.queueing.owed[i] and self._may_claim(i, gain):
            gain = max(gain, 1.0)
        elif self.queueing.owing[i]:
            gain = min(gain, _A_GPU_WELL_USED)
        return -round(10 * gain), self.order[i], i

    def _may_claim(self, i: int, gain: float) -> bool:
        """Whether i may have one more bundle for fairness: it makes good use of it and has less than its share."""
        have = self.count[i] * self.width[i]
        return gain >= _A_GPU_WELL_USED and have < self.queueing.equal_share

    def _serve(self, i: int) -> bool:
        bundle = self._free_bundle(i)
        if bundle is None:
            bundle = self._owed_bundle(i)
        if bundle is None:
            bundle = self._cheap_bundle(i)
        if bundle is None:
            return False
        devices = self.rollouts[i].bundles[bundle]
        if not self.free.issuperset(devices):
            for device in devices:
                if device in self.at:
                    self._stand_up(self.at[device])
            if not self.count[i]:  # a first bundle may be taken from who keeps his others: what was beside it is free
                for placement in self.shared.values():
                    placement.kept.clear()
        self._sit(_Seat(i, bundle, devices, new=True))
        return True

    def _paid_s(self, rollout: RolloutState) -> float:
        """How long who was given a bundle keeps what it has, for all but somebody's first."""
        load_s = rollout.demand.load_s or _SOME_LOAD_S
        return min(max(self.policy.payback * load_s, _LEAST_PAID_S), _MOST_PAID_S)

    def _standing(self, i: int, count: int) -> int:
        """Of bundle number `count + 1` of rollout i: 0 where it is not due to it, else the more the more it is owed."""
        if count * self.width[i] >= self.queueing.equal_share or self.gain(i, count) < _A_GPU_WELL_USED:
            return 0
        return 3 if self.queueing.owed[i] else 1 if self.queueing.owing[i] else 2

    def _sit(self, seat: _Seat) -> None:
        self.gained[seat.rollout] = True
        self.seats[seat.rollout][seat.bundle] = seat
        self.count[seat.rollout] += 1
        self.free.difference_update(seat.devices)
        for device in seat.devices:
            self.at[device] = seat

    def _stand_up(self, seat: _Seat) -> None:
        del self.seats[seat.rollout][seat.bundle]
        self.count[seat.rollout] -= 1
        for device in seat.devices:
            del self.at[device]
        self.free.update(seat.devices)

    def _placement(self, i: int) -> _Placement:
        placement = self.placements[i]
        if placement is None:
            bundles = self.rollouts[i].bundles
            placement = self.shared.get(id(bundles))
            if placement is None:
                placement = self.shared[id(bundles)] = _Placement(bundles, self)
            self.placements[i] = placement
        return placement

    def _free_bundle(self, i: int) -> int | None:
        """Rule 5: where the job's own gang will come; otherwise the best that is left of those all have in common."""
        placement, bundles = self._placement(i), self.rollouts[i].bundles
        for device in self.rollouts[i].gang_devices:
            if device in self.free:
                number = placement.bundle_at.get(device)
                if number is not None and number not in placement.due and self.free.issuperset(bundles[number]):
                    return number
        while placement.free and not self.free.issuperset(bundles[placement.free[-1]]):
            placement.free.pop()
        if placement.free and placement.free[-1] not in placement.due:
            return placement.free[-1]
        return None

    def _offer(self, j: int) -> Offer:
        """What rollout j's last bundle is worth to it; among equals, those that had most go first."""
        return self._worth(j, self.count[j]), self.queueing.lag[j], self.count[j], j

    def _worth(self, j: int, count: int) -> float:
        """What bundle number `count` is worth to rollout j, which holds it, in GPUs."""
        return _FIRST if count == 1 and self.most[j] else self.gain(j, count - 1)

    def _owed_bundle(self, i: int) -> int | None:
        """Rule 4: a bundle of somebody who was given a turn more than i, holds more than i, and keeps one."""
        debtors = self.queueing.debtors(i)
        if not debtors or not self.count[i] or not self._may_claim(i, self.gain(i, self.count[i])):
            return None
        for j in debtors:
            has_more = self.count[j] > 1 and self.count[j] * self.width[j] > self.count[i] * self.width[i]
            if has_more and self._least_loss(i, j) < _BUT_A_FIRST:
                for bundle in self._bundles_over(i, j):
                    if self._loss(i, bundle) < _BUT_A_FIRST:
                        return bundle
        return None

    def _cheap_bundle(self, i: int) -> int | None:
        """A held bundle whose holders lose less than `limit` by it, from the cheapest offer up."""
        limit = self._limit(i)
        if limit <= _ANYTHING and not self.spare:
            return None
        placement = self._placement(i)
        if placement.offers is None:
            placement.offers = [self._offer(j) for j in self._holders(placement.bundle_at)]
            placement.offers.sort()
        offers, at, dear, found = placement.offers, 0, set[int](), None
        changed, kept = False, placement.kept if self.count[i] else frozenset()
        while at < len(offers) and offers[at][0] < limit:
            _, _, count, j = offers[at]
            if count != self.count[j] or not self.seats[j]:
                del offers[at]
                if count > self.count[j] > 0 and self.seats[j]:
                    insort(offers, self._offer(j), at)  # it has lost some since: what is left is worth more
                    changed = True
                continue
            at += 1
            if (self.count[i] and self._keeps(j, count)) or self._least_loss(i, j) >= limit:
                continue
            here = False  # else it has nothing left here, and gets nothing that could be taken again
            for bundle in self._bundles_over(i, j):
                here = True
                if bundle in kept or bundle in dear:  # looked at already, over another rollout's seat
                    continue
                if self._loss(i, bundle) < limit:
                    found = bundle
                    break
                dear.add(bundle)
            if found is not None:
                break
            if not here:
                at -= 1
                del offers[at]
        if changed:
            offers.sort()
        return found

    def _holders(self, devices: Mapping[int, int]) -> Iterable[int]:
        """The rollouts that hold one of these devices."""
        if len(devices) < len(self.at) // 4:
            return {self.at[device].rollout for device in devices.keys() & self.at.keys()}
        held = enumerate(self.seats)
        return [j for j, seats in held if any(not devices.keys().isdisjoint(s.devices) for s in seats.values())]

    def _limit(self, i: int) -> float:
        """What the present holders of a bundle may lose, at most, by its going to rollout i (rules 3 and 4)."""
        demand, first = self.rollouts[i].demand, self.count[i] == 0
        waited_s = self.rollouts[i].waited_s
        if first and waited_s >= self.policy.starving_s:
            return math.inf
        if first and waited_s >= self.policy.patience_s:
            return _BUT_A_FIRST
        ends_s = demand.floor_s + demand.work_s / (self.count[i] + 1)  # 0: not known
        switch_gpu_s = self.policy.payback * (demand.load_s or _SOME_LOAD_S)
        paying = self.gain(i, self.count[i]) - switch_gpu_s / min(self.policy.dwell_s, ends_s or math.inf)
        return max(paying, _ANYTHING)

    def _bundles_over(self, i: int, j: int) -> Iterator[int]:
        """Bundles of rollout i on running seats of rollout j, newest seat first, that no gang is about to take."""
        bundle_at, due = self._placement(i).bundle_at, self._placement(i).due
        for seat in reversed(self.seats[j].values()):
            number = bundle_at.get(seat.devices[0])
            if number is not None and not seat.new and number not in due:
                yield number

    def _least_loss(self, i: int, j: int) -> float:
        """What is lost, at least, by any bundle of rollout i that takes one from rollout j."""
        return self.width[j] * self._loss_of(i, j, 1) / self.width[i]

    def _loss(self, i: int, bundle: int) -> float:
        """What those who sit on it lose, per bundle of i's size; infinite when a device is out of reach."""
        devices = self.rollouts[i].bundles[bundle]
        only = self.at.get(devices[0])
        if only is not None and only.devices == devices:  # the usual case: one bundle for another
            return math.inf if only.new else self._loss_of(i, only.rollout, 1)
        loss, lost, taken = 0.0, set[_Seat](), dict[int, int]()
        for device in devices:
            seat = self.at.get(device)
            if seat is None:
                if device not in self.free:
                    return self._out_of_reach(i, bundle)
            elif seat not in lost:
                if seat.new:
                    return self._out_of_reach(i, bundle)
                lost.add(seat)
                j = seat.rollout
                taken[j] = number = taken.get(j, 0) + 1
                if self.count[i] and self._keeps(j, self.count[j] - number + 1):
                    return self._out_of_reach(i, bundle)
                loss += len(seat.devices) * self._loss_of(i, j, number)
                if loss == math.inf:
                    return loss
        return loss / len(devices)

    def _out_of_reach(self, i: int, bundle: int) -> float:
        self._placement(i).kept.add(bundle)
        return math.inf

    def _keeps(self, j: int, count: int) -> bool:
        """Whether rollout j does not lose its bundle number `count` in this division, unless for somebody's first."""
        return self.gained[j] and 1 < count <= self.most[j]

    def _loss_of(self, i: int, j: int, number: int) -> float:
        """What rollout j loses when its `number`-th last bundle goes to i; infinite when that may not be."""
        count, queueing = self.count[j] - number + 1, self.queueing
        if j == i:
            return math.inf
        if count == 1 and self.most[j]:
            return _FIRST if self.rollouts[j].held_s >= queueing.turn_s[i] else math.inf
        if self.count[i] and count <= self.most[j]:
            within = (count - 1) * self.width[j] <= queueing.equal_share
            if within and queueing.owes(i, j):
                return math.inf  # it has been given less than i, and no more than its share
            if self.gained[j]:
                return math.inf
            standing = self._standing(j, count - 1)
            if standing and standing > self._standing(i, self.count[i]):
                return math.inf
        return self.gain(j, count - 1)
