"""The reference policy: devices in proportion to outstanding trajectories.

Seats (bundles) are awarded one by one to the rollout with the highest average of trajectories per device, counting the
seat to be awarded: the method of highest averages (D'Hondt 1882; Jefferson), restricted to bundles that exist and are
within reach. Restricted as it is, this is progressive filling: a rollout that finds no bundle drops out.

- First seats come before all others, longest wait first, so that nobody with demand stays at zero while somebody has
  two. Where that needs it, rollouts with one bundle move (an augmenting path; Berge 1957).
- No seat beyond the number of trajectories: such a seat is worth nothing and is the first to be given up. That makes
  all seats of a rollout without demand worth nothing: it keeps them until somebody can use them.
- Held seats stay. One is taken only for a seat worth more than `1 + margin` times as much: equal rollouts never swap.
- When there are more rollouts than bundles, one that waited `patience_s` takes the bundle held longest,
  from a rollout that has run for that long as well.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlix.scheduler.plan import Expand
from rlix.scheduler.policies.base import Pool
from rlix.scheduler.snapshot import RolloutState, bundle_at


@dataclass(frozen=True, slots=True)
class Proportional:
    margin: float = 0.25
    patience_s: float = 150.0

    def divide(self, pool: Pool) -> Sequence[Expand]:
        return _Division(pool, self).run()


proportional = Proportional()


@dataclass(slots=True)
class _Placement:
    """The bundles a rollout may use; shared by all rollouts with the same ones. What is expensive is built on use."""

    bundles: tuple[tuple[int, ...], ...]
    index: Mapping[int, int] | None = None  # device -> bundle
    candidates: list[int] | None = None  # bundles that were free when first asked for, best last
    seen: int = 0  # how much of `_Division.returned` has been looked at
    donors: list[tuple[float, int]] | None = None  # heap of (worth of the last seat, rollout)
    too_dear: set[int] = field(default_factory=set)  # bundles that once cost more than somebody's limit

    def index_of_device(self) -> Mapping[int, int]:
        if self.index is None:
            self.index = bundle_at(self.bundles)
        return self.index


@dataclass(slots=True, eq=False)
class _Seat:
    """A bundle somebody holds: from before (`epoch` > 0) or awarded in this division."""

    rollout: int
    bundle: int
    devices: tuple[int, ...]
    epoch: int = 0


@dataclass(slots=True)
class _Division:
    """The state of one division. Seat worths are trajectories per device; a first seat is worth infinity."""

    pool: Pool
    policy: Proportional
    rollouts: Sequence[RolloutState] = field(init=False)
    free: set[int] = field(init=False)
    owner: dict[int, _Seat] = field(init=False)  # device -> the seat on it that could be taken
    seats: list[dict[int, _Seat]] = field(init=False)  # per rollout: bundle -> seat, oldest first
    count: list[int] = field(init=False)  # per rollout: seats and pinned bundles
    trajectories: list[int] = field(init=False)  # per rollout: outstanding
    per_device: list[float] = field(init=False)  # per rollout: trajectories over the devices of one bundle
    width: list[int] = field(init=False)  # per rollout: devices per bundle
    placements: list[_Placement] = field(init=False)  # per rollout
    returned: list[int] = field(default_factory=list)  # devices that became free during the division
    dead_ends: set[int] = field(default_factory=set)  # placements from which no augmenting path leads on, by identity

    def __post_init__(self) -> None:
        pool = self.pool
        self.rollouts = pool.rollouts
        self.free = set(pool.free)
        self.seats = [{} for _ in self.rollouts]
        self.count = list(pool.pinned)
        held = [_Seat(h.rollout, h.bundle, h.devices, h.epoch) for h in pool.holdings]
        self.owner = {device: held[at] for device, at in pool.owner.items()}
        for seat in held:
            self.seats[seat.rollout][seat.bundle] = seat
            self.count[seat.rollout] += 1
        self.trajectories = [r.demand.trajectories for r in self.rollouts]
        self.width = [len(r.bundles[0]) if r.bundles else 1 for r in self.rollouts]
        self.per_device = [n / width for n, width in zip(self.trajectories, self.width, strict=True)]
        shared: dict[int, _Placement] = {}  # by identity, for speed only: equal tuples may as well be separate
        self.placements = [shared.setdefault(id(r.bundles), _Placement(r.bundles)) for r in self.rollouts]

    def run(self) -> list[Expand]:
        bids = [self._bid(i) for i in range(len(self.rollouts))]  # the valid one of each rollout
        queue = [bid for bid in bids if bid is not None]
        heapq.heapify(queue)
        while queue:
            bid = heapq.heappop(queue)
            i = bid[2]
            if bid is not bids[i]:
                continue  # rollout i has lost a seat since and has bid again
            losers = self._serve(i)
            if losers is None:
                bids[i] = None
                continue
            for j in (i, *losers):
                bids[j] = renewed = self._bid(j)
                if renewed is not None:
                    heapq.heappush(queue, renewed)
        return [
            Expand(self.rollouts[i].pipeline_id, self.rollouts[i].cluster, seat.bundle)
            for i, seats in enumerate(self.seats)
            for seat in seats.values()
            if not seat.epoch
        ]

    def _worth(self, i: int, number: int) -> float:
        """What the `number`-th seat (from 1) of rollout i is worth, in trajectories per device."""
        if number > self.trajectories[i]:
            return 0.0
        return math.inf if number == 1 else self.per_device[i] / number

    def _bid(self, i: int) -> tuple[float, float, int] | None:
        """The place of rollout i in the queue for one more seat; None when it can use none."""
        number = self.count[i] + 1
        if number > len(self.rollouts[i].bundles):
            return None
        worth = self._worth(i, number)
        return (-worth, -self.rollouts[i].waited_s, i) if worth > 0 else None

    def _serve(self, i: int) -> list[int] | None:
        """Award rollout i one seat. Returns the rollouts that lost one for it; None when there is no seat for i."""
        bundle = self._free_bundle(i)
        if bundle is None:
            worth = self._worth(i, self.count[i] + 1)
            bundle = self._takeable_bundle(i, worth / (1 + self.policy.margin))
        if bundle is None and self.count[i] == 0:
            losers = self._move_others_for(i)
            if losers is not None:
                return losers
            bundle = self._bundle_after_patience(i)
        return None if bundle is None else self._award(i, bundle)

    def _award(self, i: int, bundle: int) -> list[int]:
        """Give rollout i the bundle; returns the rollouts that lost a seat on it."""
        devices = self.rollouts[i].bundles[bundle]
        lost = [self.owner[device] for device in devices if device in self.owner]
        losers = []
        for seat in lost:
            if self.seats[seat.rollout].get(seat.bundle) is seat:
                self._vacate(seat)
                losers.append(seat.rollout)
        self.free.difference_update(devices)
        for seat in lost:
            if len(seat.devices) > 1:
                self.returned += [device for device in seat.devices if device in self.free]
        awarded = _Seat(i, bundle, devices)
        for device in devices:
            self.owner[device] = awarded
        self.seats[i][bundle] = awarded
        self.count[i] += 1
        return losers

    def _vacate(self, seat: _Seat) -> None:
        del self.seats[seat.rollout][seat.bundle]
        self.count[seat.rollout] -= 1
        for device in seat.devices:
            if self.owner.pop(device, None) is not None:
                self.free.add(device)

    def _free_bundle(self, i: int) -> int | None:
        """The first free bundle in registered order, those that a waiting gang will take last."""
        if len(self.free) < self.width[i]:
            return None
        place = self.placements[i]
        bundles, free = place.bundles, self.free
        if place.candidates is None:
            found = [k for k, bundle in enumerate(bundles) if free.issuperset(bundle)]
            if self.pool.reserved:
                found.sort(key=lambda k: not self.pool.reserved.isdisjoint(bundles[k]))
            found.reverse()
            place.candidates = found
            place.seen = len(self.returned)
        while True:
            while place.candidates:
                if free.issuperset(bundles[place.candidates[-1]]):
                    return place.candidates[-1]
                place.candidates.pop()
            if place.seen == len(self.returned):
                return None
            fresh = map(place.index_of_device().get, self.returned[place.seen :])
            place.candidates = [k for k in fresh if k is not None][::-1]
            place.seen = len(self.returned)

    def _takeable_bundle(self, i: int, limit: float) -> int | None:
        """A bundle all of whose seats are worth less than `limit`, from the poorest donor first.

        Limits fall from call to call (the queue is served richest bid first) and the worth of a donor's last seat only
        rises, so a donor that cannot help now is struck off the placement's heap for good.
        """
        place = self.placements[i]
        index = place.index_of_device()
        if place.donors is None:
            within = {self.owner[device].rollout for device in index.keys() & self.owner.keys()}
            bids = [(self._worth(j, self.count[j]), j) for j in within]
            place.donors = [bid for bid in bids if bid[0] < math.inf]
            heapq.heapify(place.donors)
        donors = place.donors
        while donors:
            worth, j = donors[0]
            current = self._worth(j, self.count[j]) if self.seats[j] else math.inf
            if current == math.inf:
                heapq.heappop(donors)
            elif current != worth:
                heapq.heapreplace(donors, (current, j))
            elif worth >= limit:
                return None
            else:
                bundle = self._bundle_from(j, place, limit)
                if bundle is not None:
                    return bundle
                heapq.heappop(donors)
        return None

    def _bundle_from(self, donor: int, place: _Placement, limit: float) -> int | None:
        index = place.index_of_device()
        for seat in self.seats[donor].values():
            for device in seat.devices:
                bundle = index.get(device)
                if bundle is None or bundle in place.too_dear:
                    continue
                if self._price(place.bundles[bundle]) < limit:
                    return bundle
                place.too_dear.add(bundle)
        return None

    def _price(self, devices: tuple[int, ...]) -> float:
        """The worth of the dearest seat that would be lost on these devices; infinite when one is out of reach."""
        lost: set[_Seat] = set()
        for device in devices:
            seat = self.owner.get(device)
            if seat is not None:
                lost.add(seat)
            elif device not in self.free:
                return math.inf
        if len(lost) == 1:
            j = lost.pop().rollout
            return self._worth(j, self.count[j])
        losses = Counter(seat.rollout for seat in lost)
        return max((self._worth(j, self.count[j] - n + 1) for j, n in losses.items()), default=0.0)

    def _move_others_for(self, i: int) -> list[int] | None:
        """Seat rollout i by moving rollouts with one bundle along an augmenting path, found breadth first.

        Returns the rollouts that lost a seat at the end of the path; None when there is no path. What a failed search
        has reached stays a dead end after any later success, so it is not searched again.
        """
        came_from: dict[int, tuple[int, int]] = {}  # rollout -> (the rollout that wants its place, with which bundle)
        scanned: set[int] = set()
        frontier = [i]
        for mover in frontier:  # grows while it is walked
            place = self.placements[mover]
            if id(place) in scanned or id(place) in self.dead_ends:
                continue
            scanned.add(id(place))
            for bundle, devices in enumerate(place.bundles):
                victim = self._only_holder(devices)
                if victim is None or victim == i or victim in came_from:
                    continue
                if not self.trajectories[victim]:
                    moves = self._path(mover, bundle, came_from)  # it needs no other place
                    if moves is not None:
                        return self._move(moves)
                    continue
                came_from[victim] = (mover, bundle)
                frontier.append(victim)
                target = self._free_bundle(victim)
                if target is None:
                    target = self._takeable_bundle(victim, math.inf)
                if target is not None:
                    moves = self._path(victim, target, came_from)
                    if moves is not None:
                        return self._move(moves)
        self.dead_ends |= scanned
        return None

    def _only_holder(self, devices: tuple[int, ...]) -> int | None:
        """The rollout that alone stands on these devices, with its only bundle; None if it is not so."""
        holder = None
        for device in devices:
            seat = self.owner.get(device)
            if seat is None:
                if device not in self.free:
                    return None
            elif holder is not None and seat.rollout != holder:
                return None
            else:
                holder = seat.rollout
        return holder if holder is not None and self.count[holder] == 1 else None

    def _path(self, last: int, target: int, came_from: dict[int, tuple[int, int]]) -> list[tuple[int, int]] | None:
        """The moves (rollout, new bundle) from the end of the path to its start; None when two of them overlap."""
        moves = [(last, target)]
        while moves[-1][0] in came_from:
            moves.append(came_from[moves[-1][0]])
        devices = [device for mover, bundle in moves for device in self.rollouts[mover].bundles[bundle]]
        return moves if len(devices) == len(set(devices)) else None

    def _move(self, moves: list[tuple[int, int]]) -> list[int]:
        for mover, _ in moves:
            for seat in list(self.seats[mover].values()):
                self._vacate(seat)
                self.returned += seat.devices
        return [loser for mover, bundle in moves for loser in self._award(mover, bundle)]

    def _bundle_after_patience(self, i: int) -> int | None:
        """For a rollout that waited too long: the bundle whose holders have held theirs longest."""
        if self.rollouts[i].waited_s < self.policy.patience_s:
            return None
        best: tuple[int, int] | None = None
        for bundle, devices in enumerate(self.rollouts[i].bundles):
            if any(d not in self.owner and d not in self.free for d in devices):
                continue
            seats = [self.owner[d] for d in devices if d in self.owner]
            if any(self.rollouts[seat.rollout].held_s < self.policy.patience_s for seat in seats):
                continue
            epochs = [seat.epoch for seat in seats]
            if min(epochs, default=0) > 0 and (best is None or (max(epochs), bundle) < best):
                best = (max(epochs), bundle)
        return None if best is None else best[1]
