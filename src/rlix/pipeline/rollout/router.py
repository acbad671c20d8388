"""Which replica generates which trajectory: the pure half of elastic rollouts.

A trajectory is queued, in flight on exactly one replica, or finished. A replica that shrinks hands its unfinished
trajectories back with the tokens they have; they continue elsewhere from that prefix. `rollout.py` does the I/O.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rlix.engine.inference.requests import Collected, DecodingCounters, GenerationRequest
from rlix.pipeline.rollout.rebalance import Estimates, Work, prefers_cached, rollout_s, to_move
from rlix.pipeline.rollout.shares import FairQueue
from rlix.protocol.messages import Demand

Owner = tuple[str, str]
"""Whose trajectories: which adapter's ("": the model's own), and for which purpose ("": to be learnt from)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every trajectory of a rollout is sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Trajectory:
    """A prompt and what the policy has answered so far; `versions[i]` produced `token_ids[i]`.

    `cached_on` names the replica, and which of its lives, that may still have these tokens in its prefix cache; a later
    turn of the same conversation is submitted with the earlier one's, so that it goes there when that is worth it.
    `adapter` answers; "": the model itself. `purpose`: what it is for, "": to be learnt from; what is for another is
    expected and abandoned apart. `recalled`: it was asked back from where it waited, which happens once: where memory
    bounds what is decoded, replicas only seem to have slots free.
    """

    id: str
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cached_on: tuple[int, int] | None = None
    adapter: str = ""
    purpose: str = ""
    recalled: bool = False

    @property
    def owner(self) -> Owner:
        return self.adapter, self.purpose

    @property
    def tokens_held(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def request(self) -> GenerationRequest:
        return GenerationRequest(
            id=self.id,
            prompt_ids=self.prompt_ids,
            generated_ids=tuple(self.token_ids),
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            stop_token_ids=self.sampling.stop_token_ids,
            seed=self.seed,
            adapter=self.adapter,
        )


class ReplicaState(StrEnum):
    """A dead replica goes back to ready only through loading, like one that is off."""

    OFF = "off"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(slots=True)
class _Replica:
    state: ReplicaState = ReplicaState.OFF
    in_flight: dict[str, float] = field(default_factory=dict)  # by id, when its tokens were last known
    recalled: set[str] = field(default_factory=set)  # of those in flight, that were asked back
    limit: int = 0  # how many it may have in flight
    life: int = 0  # grows whenever what it has cached is lost
    counted: DecodingCounters = field(default_factory=DecodingCounters)  # at the last report


class Router:
    """Trajectories and replicas of one rollout cluster. Times are seconds of the caller's clock.

    A replica is given a few more trajectories than it decodes at a time, so that one that ends is followed at once. How
    many it decodes is its own matter: at most `slots`, fewer while it says that others wait for memory.

    Args:
        replicas: number of bundles of the cluster.
        slots: most trajectories one replica decodes at a time.
        spare: trajectories beyond those; default: an eighth of `slots`.
        prefix_cache: whether replicas keep the prefixes they computed, so that going back to one pays.
    """

    def __init__(self, replicas: int, slots: int, *, spare: int | None = None, prefix_cache: bool = False) -> None:
        self._slots = slots
        self._spare = max(1, slots // 8) if spare is None else spare
        self._replicas = [_Replica(limit=slots + self._spare) for _ in range(replicas)]
        self.late_s = 0.0  # by how much decoding took longer than declared, in all
        self.decoding_s = 0.0  # of all replicas together
        self._prefix_cache = prefix_cache
        self._queue = FairQueue()
        self._open: dict[str, Trajectory] = {}
        self._estimates = Estimates(slots)
        self.decoded = (0, 0)
        """Tokens so far, and how many it would have been with every slot in use."""
        self.recomputed = 0
        """Tokens so far that were read again, because their trajectory went on where they were not cached."""

    # ---- trajectories ----------------------------------------------------------------------------------------

    def submit(self, trajectories: Iterable[Trajectory]) -> None:
        """Raises ValueError for a trajectory that is open, or that a replica still works on after it was dropped."""
        given, known = list(trajectories), set(self._open).union(*(replica.in_flight for replica in self._replicas))
        for trajectory in given:
            if trajectory.id in known:
                raise ValueError(f"trajectory {trajectory.id!r} was submitted twice")
            known.add(trajectory.id)
        for trajectory in given:
            self._open[trajectory.id] = trajectory
            self._queue.append(trajectory.adapter, trajectory.id)

    def drop(self, ids: Collection[str]) -> dict[int, list[str]]:
        """Forget these open trajectories; by replica, which of them are in flight. Those still end through `take`,
        which ignores what it brings."""
        for id in ids:
            self._open.pop(id, None)
        self._queue.discard(ids)
        return {
            number: found
            for number, replica in enumerate(self._replicas)
            if (found := sorted(id for id in replica.in_flight if id in ids))
        }

    def take(self, bundle: int, collected: Collected, now: float = 0.0) -> list[Trajectory]:
        """Take in what a replica reports: the finished trajectories; the aborted ones are queued again, first."""
        replica = self._replicas[bundle]
        self._learn(replica, collected.counters)
        finished, aborted = [], []
        for chunk in collected.chunks:
            if chunk.id not in replica.in_flight:
                continue
            replica.in_flight[chunk.id] = now
            if chunk.finish_reason is not None:
                del replica.in_flight[chunk.id]
                replica.recalled.discard(chunk.id)
            trajectory = self._open.get(chunk.id)
            if trajectory is None:
                continue
            trajectory.token_ids += chunk.token_ids
            trajectory.logprobs += chunk.logprobs
            trajectory.versions += chunk.versions
            if chunk.finish_reason == "abort":
                aborted.append(chunk.id)
            elif chunk.finish_reason is not None:
                trajectory.finish_reason = chunk.finish_reason
                self._estimates.saw_end(len(trajectory.token_ids))
                finished.append(self._open.pop(chunk.id))
        self._requeue(reversed(aborted))
        return finished

    def give_up(self, bundle: int, ids: Collection[str]) -> None:
        """The replica refused these trajectories, and they are not to be tried again."""
        for id in ids:
            self._replicas[bundle].in_flight.pop(id, None)
            self._replicas[bundle].recalled.discard(id)
            self._open.pop(id, None)

    @property
    def outstanding(self) -> int:
        """How many trajectories are open."""
        return len(self._open)

    def demand(self, now: float = 0.0) -> Demand:
        """What is open, as the scheduler wants to know it: tokens and times are expected ones."""
        lefts = list(self._lefts(now).values())
        work_s, floor_s = rollout_s(lefts, self._estimates)
        return Demand(len(lefts), round(sum(lefts)), knee=self._estimates.knee, work_s=work_s, floor_s=floor_s)

    def open_by_owner(self) -> Counter[Owner]:
        """How many trajectories of each owner are open."""
        return Counter(trajectory.owner for trajectory in self._open.values())

    def flying_by_adapter(self) -> Counter[str]:
        """How many trajectories of each adapter replicas have."""
        return Counter(self._open[id].adapter for r in self._replicas for id in r.in_flight if id in self._open)

    def tokens_by_owner(self, now: float) -> dict[Owner, float]:
        """How many tokens are expected of what is open, by owner."""
        tokens: dict[Owner, float] = {}
        for id, left in self._lefts(now).items():
            owner = self._open[id].owner
            tokens[owner] = tokens.get(owner, 0.0) + left
        return tokens

    # ---- replicas --------------------------------------------------------------------------------------------

    def state(self, bundle: int) -> ReplicaState:
        return self._replicas[bundle].state

    def in_flight(self, bundle: int) -> int:
        return len(self._replicas[bundle].in_flight)

    def bundles(self, *states: ReplicaState) -> list[int]:
        return [i for i, replica in enumerate(self._replicas) if replica.state in states]

    def loading(self, bundle: int, *, keeps_cache: bool = False) -> None:
        """`keeps_cache`: it gets adapters on the weights that it has, which leaves the others' cache alone."""
        self._move(bundle, ReplicaState.LOADING, ReplicaState.OFF, ReplicaState.READY, ReplicaState.DEAD)
        replica = self._replicas[bundle]
        replica.life += not keeps_cache  # new weights, or a new process: either way its cache is empty
        replica.limit = self._slots + self._spare

    def ready(self, bundle: int) -> None:
        self._move(bundle, ReplicaState.READY, ReplicaState.LOADING)

    def draining(self, bundle: int) -> None:
        self._move(bundle, ReplicaState.DRAINING, ReplicaState.LOADING, ReplicaState.READY)

    def off(self, bundle: int) -> None:
        """The replica holds nothing any more; what it still had in flight (it died) is queued again, first."""
        self._end(bundle, ReplicaState.OFF)

    def dead(self, bundle: int) -> None:
        """The replica failed; what it had in flight is queued again, first. Its devices may not be free yet."""
        self._replicas[bundle].counted = DecodingCounters()  # another process will count anew
        self._end(bundle, ReplicaState.DEAD)

    # ---- decisions -------------------------------------------------------------------------------------------

    def dispatch(self, now: float = 0.0) -> list[tuple[int, list[GenerationRequest]]]:
        """Hand queued trajectories to ready replicas, as far as they may have more in flight.

        Each goes to the least loaded one, or to a busier one that has its prefix cached when `prefers_cached` says so.
        While others load they are given no more than they decode at a time: the rest would wait in the wrong place.
        """
        loads = [(len(r.in_flight), i) for i, r in enumerate(self._replicas) if r.state is ReplicaState.READY]
        heapq.heapify(loads)
        most = self._slots + (0 if self.bundles(ReplicaState.LOADING) else self._spare)
        given: dict[int, list[GenerationRequest]] = {}
        flying = self.flying_by_adapter()
        while self._queue and loads:
            load, least = loads[0]
            if load != len(self._replicas[least].in_flight):  # it was given one
                heapq.heapreplace(loads, (len(self._replicas[least].in_flight), least))
                continue
            if load >= min(most, self._replicas[least].limit):
                heapq.heappop(loads)
                continue
            trajectory = self._open[self._queue.popleft(flying)]
            flying[trajectory.adapter] += 1
            bundle = self._choose(trajectory, least)
            replica = self._replicas[bundle]
            replica.in_flight[trajectory.id] = now
            if trajectory.token_ids and not (self._prefix_cache and trajectory.cached_on == (bundle, replica.life)):
                self.recomputed += trajectory.tokens_held
            trajectory.cached_on = (bundle, replica.life)
            given.setdefault(bundle, []).append(trajectory.request())
        return list(given.items())

    def rebalance(self, now: float) -> list[tuple[int, list[str]]]:
        """What to abort where, so that it goes on on the ready replica with least to do; see `to_move`.

        Aborted trajectories come back through `take`, are queued and dispatched to the least loaded replica.
        """
        ready = self.bundles(ReplicaState.READY)
        if len(ready) < 2 or self._queue:
            return []
        target = min(ready, key=lambda i: (self.in_flight(i), i))
        donor = max(ready, key=lambda i: (self.in_flight(i), -i))
        if donor == target:
            return []
        ids = [id for id in self._replicas[donor].in_flight if id in self._open]
        moved = to_move(self._work(donor, now), self._work(target, now), self._estimates)
        for i in moved:
            self._open[ids[i]].cached_on = None
        return [(donor, sorted(ids[i] for i in moved))] if moved else []

    def recall(self) -> list[tuple[int, list[str]]]:
        """What to abort where, because it waits there for a slot while other ready replicas have some free.

        It was given to spare, before those reported their free slots. The last that a replica was given wait, and have
        no tokens that another would have to compute again.
        """
        if self._queue:
            return []
        staying = {i: [id for id in r.in_flight if id not in r.recalled] for i, r in enumerate(self._replicas)}
        over = {i: len(staying[i]) - self._decodes(i) for i in self.bundles(ReplicaState.READY)}
        free = -sum(min(0, count) for count in over.values()) - sum(len(r.recalled) for r in self._replicas)
        found = []
        for bundle, waiting in over.items():
            count = min(waiting, free)
            last = staying[bundle][-count:] if count > 0 else []
            ids = [id for id in last if id in self._open and not self._open[id].recalled]
            for id in ids:
                self._open[id].recalled, self._open[id].cached_on = True, None
            if ids:
                self._replicas[bundle].recalled.update(ids)
                free -= len(ids)
                found.append((bundle, ids))
        return found

    # ---- below -----------------------------------------------------------------------------------------------

    def _decodes(self, bundle: int) -> int:
        """How many trajectories a replica decodes at a time, as far as it has reported."""
        return min(self._slots, self._replicas[bundle].limit - self._spare)

    def _choose(self, trajectory: Trajectory, least: int) -> int:
        if not self._prefix_cache or trajectory.cached_on is None:
            return least
        bundle, life = trajectory.cached_on
        replica = self._replicas[bundle]
        if replica.state is not ReplicaState.READY or replica.life != life or len(replica.in_flight) >= replica.limit:
            return least
        extra = len(replica.in_flight) - self.in_flight(least)
        left = self._expected_left(trajectory)
        return bundle if prefers_cached(trajectory.tokens_held, left, extra) else least

    def _lefts(self, now: float) -> dict[str, float]:
        """Tokens to go of each open trajectory, as expected."""
        since: dict[str, float] = {}
        for replica in self._replicas:
            batch = len(replica.in_flight)
            since |= {id: self._estimates.steps_since(now - known, batch) for id, known in replica.in_flight.items()}
        return {id: self._expected_left(t, since.get(id, 0.0)) for id, t in self._open.items()}

    def _work(self, bundle: int, now: float) -> list[Work]:
        """What a replica has in flight and is still wanted; tokens since they were last known are estimated."""
        replica, work = self._replicas[bundle], []
        for id, known in replica.in_flight.items():
            if (trajectory := self._open.get(id)) is not None:
                since = self._estimates.steps_since(now - known, len(replica.in_flight))
                work.append(Work(trajectory.tokens_held + int(since), self._expected_left(trajectory, since)))
        return work

    def _expected_left(self, trajectory: Trajectory, since: float = 0.0) -> float:
        """Tokens to go, when `since` tokens were added that were not heard of yet."""
        return self._estimates.expected_left(len(trajectory.token_ids) + since, trajectory.sampling.max_new_tokens)

    def _learn(self, replica: _Replica, counters: DecodingCounters) -> None:
        """From what was decoded since the last report: how long a step takes, and how many fit.

        While some wait inside the replica it has no room for more than run; when none wait, it is tried with more.
        """
        before, replica.counted = replica.counted, counters
        steps = counters.steps - before.steps
        if steps > 0:  # else nothing was decoded, or by another process
            tokens = counters.tokens - before.tokens
            self._estimates.saw_steps(counters.seconds - before.seconds, steps, tokens)
            self.decoding_s += counters.seconds - before.seconds
            self.decoded = (self.decoded[0] + tokens, self.decoded[1] + steps * self._slots)
            self.late_s += counters.late_s - before.late_s
        if counters.waiting > 0:
            replica.limit = counters.running + self._spare
        else:
            replica.limit = min(replica.limit + self._spare, self._slots + self._spare)

    def _end(self, bundle: int, state: ReplicaState) -> None:
        replica = self._replicas[bundle]
        self._requeue(sorted(replica.in_flight.keys() & self._open.keys(), reverse=True))
        replica.in_flight.clear()
        replica.recalled.clear()
        replica.state = state

    def _requeue(self, ids: Iterable[str]) -> None:
        """Before everything else of their adapters, the last one first."""
        for id in ids:
            self._queue.appendleft(self._open[id].adapter, id)

    def _move(self, bundle: int, to: ReplicaState, *allowed: ReplicaState) -> None:
        replica = self._replicas[bundle]
        if replica.state not in allowed:
            raise RuntimeError(f"replica {bundle} is {replica.state}, so it cannot become {to}")
        replica.state = to
