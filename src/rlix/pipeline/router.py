"""Which replica generates which trajectory: the pure half of elastic rollouts.

A trajectory is queued, in flight on exactly one replica, or finished. A replica that shrinks hands its unfinished
trajectories back with the tokens they have; they continue elsewhere from that prefix. `rollout.py` does the I/O.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlix.engine.requests import GenerationRequest, GenerationResult
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
    """A prompt and what the policy has answered so far; `versions[i]` produced `token_ids[i]`."""

    id: str
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def tokens_left(self) -> int:
        return self.sampling.max_new_tokens - len(self.token_ids)

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
    OFF = "off"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class _Replica:
    state: ReplicaState = ReplicaState.OFF
    in_flight: set[str] = field(default_factory=set)


class Router:
    """Trajectories and replicas of one rollout cluster.

    Args:
        replicas: number of bundles of the cluster.
        slots: trajectories one replica decodes at a time.
        chunk: trajectories handed over in one call; smaller chunks refill finished slots sooner.
    """

    def __init__(self, replicas: int, slots: int, chunk: int) -> None:
        self._replicas = [_Replica() for _ in range(replicas)]
        self._slots = slots
        self._chunk = chunk
        self._queue: deque[str] = deque()
        self._open: dict[str, Trajectory] = {}

    def submit(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            if trajectory.id in self._open:
                raise ValueError(f"trajectory {trajectory.id!r} was submitted twice")
            self._open[trajectory.id] = trajectory
            self._queue.append(trajectory.id)

    def drop_all(self) -> None:
        """Forget every open trajectory. Calls in flight still end through `complete`, which ignores what they bring."""
        self._open.clear()
        self._queue.clear()

    def state(self, bundle: int) -> ReplicaState:
        return self._replicas[bundle].state

    def in_flight(self, bundle: int) -> int:
        return len(self._replicas[bundle].in_flight)

    def bundles(self, *states: ReplicaState) -> list[int]:
        return [i for i, replica in enumerate(self._replicas) if replica.state in states]

    def loading(self, bundle: int) -> None:
        self._move(bundle, ReplicaState.LOADING, ReplicaState.OFF, ReplicaState.READY)

    def ready(self, bundle: int) -> None:
        self._move(bundle, ReplicaState.READY, ReplicaState.LOADING)

    def draining(self, bundle: int) -> None:
        self._move(bundle, ReplicaState.DRAINING, ReplicaState.LOADING, ReplicaState.READY)

    def off(self, bundle: int) -> None:
        """The replica holds nothing any more; what it still had in flight (it died) is queued again, first."""
        replica = self._replicas[bundle]
        self._queue.extendleft(sorted(replica.in_flight & self._open.keys(), reverse=True))
        replica.in_flight.clear()
        replica.state = ReplicaState.OFF

    def dispatch(self) -> list[tuple[int, list[GenerationRequest]]]:
        """Hand queued trajectories to ready replicas, the least loaded first, up to their slots."""
        free = [(len(r.in_flight), i) for i, r in enumerate(self._replicas) if r.state is ReplicaState.READY]
        heapq.heapify(free)
        given: dict[int, list[GenerationRequest]] = {}
        while self._queue and free and free[0][0] < self._slots:
            load, bundle = free[0]
            trajectory = self._open[self._queue.popleft()]
            self._replicas[bundle].in_flight.add(trajectory.id)
            given.setdefault(bundle, []).append(trajectory.request())
            heapq.heapreplace(free, (load + 1, bundle))
        size = self._chunk
        return [(b, requests[i : i + size]) for b, requests in given.items() for i in range(0, len(requests), size)]

    def complete(self, bundle: int, results: Sequence[GenerationResult]) -> list[Trajectory]:
        """Take in what a call returned: the finished trajectories; the others are queued again, first."""
        finished, unfinished = [], []
        for result in results:
            if result.id not in self._replicas[bundle].in_flight:
                continue  # the replica was presumed dead and the trajectory went elsewhere
            self._replicas[bundle].in_flight.discard(result.id)
            if result.id not in self._open:
                continue
            trajectory = self._open[result.id]
            trajectory.token_ids += result.token_ids
            trajectory.logprobs += result.logprobs
            trajectory.versions += result.versions or [result.weight_version] * len(result.token_ids)
            if result.finished:
                trajectory.finish_reason = result.finish_reason
                finished.append(self._open.pop(result.id))
            else:
                unfinished.append(result.id)
        self._queue.extendleft(reversed(unfinished))
        return finished

    def demand(self) -> Demand:
        open_ = self._open.values()
        return Demand(trajectories=len(open_), tokens=sum(t.tokens_left for t in open_))

    def _move(self, bundle: int, to: ReplicaState, *allowed: ReplicaState) -> None:
        replica = self._replicas[bundle]
        if replica.state not in allowed:
            raise RuntimeError(f"replica {bundle} is {replica.state}, so it cannot become {to}")
        replica.state = to
