"""Which replica generates which trajectory: the pure half of elastic rollouts.

A trajectory is queued, in flight on exactly one replica, or finished. A replica that shrinks hands its unfinished
trajectories back with the tokens they have; they continue elsewhere from that prefix. `rollout.py` does the I/O.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlix.engine.inference.requests import GenerationRequest, GenerationResult
from rlix.pipeline.rollout.rebalance import Chunk, Estimates, chunks_to_move, prefers_cached, rollout_s
from rlix.protocol.messages import Demand


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
        )


class ReplicaState(StrEnum):
    """A dead replica goes back to ready only through loading, like one that is off."""

    OFF = "off"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(slots=True)
class _Call:
    """Trajectories that were handed over together, at `time` (seconds)."""

    ids: set[str]
    time: float


@dataclass(slots=True)
class _Replica:
    state: ReplicaState = ReplicaState.OFF
    in_flight: set[str] = field(default_factory=set)
    calls: list[_Call] = field(default_factory=list)
    life: int = 0  # grows whenever what it has cached is lost


class Router:
    """Trajectories and replicas of one rollout cluster. Times are seconds of the caller's clock.

    Args:
        replicas: number of bundles of the cluster.
        slots: trajectories one replica decodes at a time.
        chunk: trajectories handed over in one call; smaller chunks refill finished slots sooner.
        prefix_cache: whether replicas keep the prefixes they computed, so that going back to one pays.
    """

    def __init__(self, replicas: int, slots: int, chunk: int, *, prefix_cache: bool = False) -> None:
        self._replicas = [_Replica() for _ in range(replicas)]
        self._slots = slots
        self._chunk = chunk
        self._prefix_cache = prefix_cache
        self._queue: deque[str] = deque()
        self._open: dict[str, Trajectory] = {}
        self._estimates = Estimates(slots)

    # ---- trajectories ----------------------------------------------------------------------------------------

    def submit(self, trajectories: Iterable[Trajectory]) -> None:
        """Raises ValueError for a trajectory that is open, or that a replica still works on after it was dropped."""
        busy = set[str]().union(*(replica.in_flight for replica in self._replicas))
        for trajectory in trajectories:
            if trajectory.id in self._open or trajectory.id in busy:
                raise ValueError(f"trajectory {trajectory.id!r} was submitted twice")
            self._open[trajectory.id] = trajectory
            self._queue.append(trajectory.id)

    def drop_all(self) -> None:
        """Forget every open trajectory. Calls in flight still end through `complete`, which ignores what they bring."""
        self._open.clear()
        self._queue.clear()

    def complete(self, bundle: int, results: Sequence[GenerationResult], now: float = 0.0) -> list[Trajectory]:
        """Take in what a call returned: the finished trajectories; the others are queued again, first."""
        replica = self._replicas[bundle]
        known = [result for result in results if result.id in replica.in_flight]
        self._learn(replica, known, now)
        self._end_calls(replica, [result.id for result in known])
        finished, unfinished = [], []
        for result in known:
            if result.id not in self._open:
                continue
            trajectory = self._open[result.id]
            trajectory.token_ids += result.token_ids
            trajectory.logprobs += result.logprobs
            trajectory.versions += result.versions or [result.weight_version] * len(result.token_ids)
            if result.finished:
                trajectory.finish_reason = result.finish_reason
                self._estimates.saw_end(len(trajectory.token_ids))
                finished.append(self._open.pop(result.id))
            else:
                unfinished.append(result.id)
        self._queue.extendleft(reversed(unfinished))
        return finished

    def give_up(self, bundle: int, ids: Collection[str]) -> None:
        """A call ended without results, and its trajectories are not to be tried again."""
        self._end_calls(self._replicas[bundle], ids)
        for id in ids:
            self._open.pop(id, None)

    @property
    def outstanding(self) -> int:
        """How many trajectories are open."""
        return len(self._open)

    def demand(self, now: float = 0.0) -> Demand:
        """What is open, as the scheduler wants to know it: tokens and times are expected ones."""
        since: dict[str, float] = {}
        for replica in self._replicas:
            for call in replica.calls:
                since |= dict.fromkeys(call.ids, self._estimates.steps_since(now - call.time, len(replica.in_flight)))
        lefts = [self._expected_left(t, since.get(id, 0.0)) for id, t in self._open.items()]
        work_s, floor_s = rollout_s(lefts, self._estimates)
        return Demand(len(lefts), round(sum(lefts)), knee=self._estimates.knee, work_s=work_s, floor_s=floor_s)

    # ---- replicas --------------------------------------------------------------------------------------------

    def state(self, bundle: int) -> ReplicaState:
        return self._replicas[bundle].state

    def in_flight(self, bundle: int) -> int:
        return len(self._replicas[bundle].in_flight)

    def bundles(self, *states: ReplicaState) -> list[int]:
        return [i for i, replica in enumerate(self._replicas) if replica.state in states]

    def loading(self, bundle: int) -> None:
        self._move(bundle, ReplicaState.LOADING, ReplicaState.OFF, ReplicaState.READY, ReplicaState.DEAD)
        self._replicas[bundle].life += 1  # new weights, or a new process: either way its cache is empty

    def ready(self, bundle: int) -> None:
        self._move(bundle, ReplicaState.READY, ReplicaState.LOADING)

    def draining(self, bundle: int) -> None:
        self._move(bundle, ReplicaState.DRAINING, ReplicaState.LOADING, ReplicaState.READY)

    def off(self, bundle: int) -> None:
        """The replica holds nothing any more; what it still had in flight (it died) is queued again, first."""
        self._end(bundle, ReplicaState.OFF)

    def dead(self, bundle: int) -> None:
        """The replica failed; what it had in flight is queued again, first. Its devices may not be free yet."""
        self._end(bundle, ReplicaState.DEAD)

    # ---- decisions -------------------------------------------------------------------------------------------

    def dispatch(self, now: float = 0.0) -> list[tuple[int, list[GenerationRequest]]]:
        """Hand queued trajectories to ready replicas, up to their slots.

        Each goes to the least loaded one, or to a busier one that has its prefix cached when `prefers_cached` says so.
        """
        loads = [(len(r.in_flight), i) for i, r in enumerate(self._replicas) if r.state is ReplicaState.READY]
        heapq.heapify(loads)
        given: dict[int, list[Trajectory]] = {}
        while self._queue and loads:
            load, least = loads[0]
            if load != len(self._replicas[least].in_flight):  # it was given one for its cache
                heapq.heapreplace(loads, (len(self._replicas[least].in_flight), least))
                continue
            if load >= self._slots:
                break
            trajectory = self._open[self._queue.popleft()]
            bundle = self._choose(trajectory, least)
            replica = self._replicas[bundle]
            replica.in_flight.add(trajectory.id)
            trajectory.cached_on = (bundle, replica.life)
            given.setdefault(bundle, []).append(trajectory)
        return [call for bundle, chosen in given.items() for call in self._calls(bundle, chosen, now)]

    def rebalance(self, now: float) -> list[tuple[int, list[str]]]:
        """What to abort where, so that it goes on on the ready replica with least to do; see `chunks_to_move`.

        Aborted trajectories come back through `complete`, are queued and dispatched to the least loaded replica.
        """
        ready = self.bundles(ReplicaState.READY)
        if len(ready) < 2 or self._queue:
            return []
        held = {i: self._chunks(self._replicas[i], now) for i in ready}
        target = min(ready, key=lambda i: (self.in_flight(i), i))
        donor = max(ready, key=lambda i: (self.in_flight(i), -i))
        if donor == target:
            return []
        moved = chunks_to_move(held[donor], held[target], self._estimates)
        ids = sorted(id for i in moved for id in self._replicas[donor].calls[i].ids)
        for id in ids:
            if id in self._open:
                self._open[id].cached_on = None
        return [(donor, ids)] if ids else []

    # ---- below -----------------------------------------------------------------------------------------------

    def _choose(self, trajectory: Trajectory, least: int) -> int:
        if not self._prefix_cache or trajectory.cached_on is None:
            return least
        bundle, life = trajectory.cached_on
        replica = self._replicas[bundle]
        if replica.state is not ReplicaState.READY or replica.life != life or len(replica.in_flight) >= self._slots:
            return least
        extra = len(replica.in_flight) - self.in_flight(least)
        left = self._expected_left(trajectory)
        return bundle if prefers_cached(trajectory.tokens_held, left, extra) else least

    def _calls(
        self, bundle: int, trajectories: Sequence[Trajectory], now: float
    ) -> list[tuple[int, list[GenerationRequest]]]:
        parts = [trajectories[i : i + self._chunk] for i in range(0, len(trajectories), self._chunk)]
        self._replicas[bundle].calls += [_Call({t.id for t in part}, now) for part in parts]
        return [(bundle, [t.request() for t in part]) for part in parts]

    def _chunks(self, replica: _Replica, now: float) -> list[Chunk]:
        """The replica's calls as `chunks_to_move` sees them; tokens since they were handed over are estimated."""
        chunks = []
        for call in replica.calls:
            open_ = [self._open[id] for id in call.ids if id in self._open]
            since = self._estimates.steps_since(now - call.time, len(replica.in_flight))
            lefts = [self._expected_left(t, since) for t in open_]
            held = sum(t.tokens_held for t in open_) + int(since * len(open_))
            chunks.append(Chunk(len(open_), held, max(lefts, default=0.0)))
        return chunks

    def _expected_left(self, trajectory: Trajectory, since: float = 0.0) -> float:
        """Tokens to go, when `since` tokens were added that were not heard of yet."""
        return self._estimates.expected_left(len(trajectory.token_ids) + since, trajectory.sampling.max_new_tokens)

    def _learn(self, replica: _Replica, results: Sequence[GenerationResult], now: float) -> None:
        if not results:
            return
        call = next((call for call in replica.calls if results[0].id in call.ids), None)
        if call is not None:
            steps = max(len(result.token_ids) for result in results)
            self._estimates.saw_call(now - call.time, steps, len(replica.in_flight))

    def _end_calls(self, replica: _Replica, ids: Collection[str]) -> None:
        replica.in_flight.difference_update(ids)
        for call in replica.calls:
            call.ids.difference_update(ids)
        replica.calls = [call for call in replica.calls if call.ids]

    def _end(self, bundle: int, state: ReplicaState) -> None:
        replica = self._replicas[bundle]
        self._queue.extendleft(sorted(replica.in_flight & self._open.keys(), reverse=True))
        replica.in_flight.clear()
        replica.calls.clear()
        replica.state = state

    def _move(self, bundle: int, to: ReplicaState, *allowed: ReplicaState) -> None:
        replica = self._replicas[bundle]
        if replica.state not in allowed:
            raise RuntimeError(f"replica {bundle} is {replica.state}, so it cannot become {to}")
        replica.state = to
