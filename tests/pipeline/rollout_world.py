"""A control plane, replica actors and background threads for a rollout manager, all moved step by step by a test.

The fakes check what must never happen: work under a lease that has ended, or a lease that ends while its device holds
bytes of the job.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from rlix.engine.inference.requests import Collected, DecodingCounters, GenerationChunk, GenerationRequest
from rlix.pipeline.rollout.rollout import RolloutManager
from rlix.pipeline.rollout.router import Router, Sampling, Trajectory
from rlix.protocol.errors import StaleEpochError
from rlix.protocol.messages import Cluster, Demand, Fence, Lease, LeaseState, LeaseStatus, Process
from rlix.protocol.types import Phase


class ActorDiedError(Exception):
    """What a call of a dead actor brings."""


@dataclass(frozen=True)
class Weights:
    version: int
    publication: str = "one"


@dataclass(eq=False)
class Call:
    """One call of a replica that has not returned; also its Ray reference."""

    rank: int
    method: str
    args: tuple[Any, ...]
    answer: "Future[Any]" = field(default_factory=Future)

    def future(self) -> "Future[Any]":
        return self.answer


@dataclass(eq=False)
class Running:
    """A request that a replica works on. `aborted`: its next chunk is its last."""

    request: GenerationRequest
    drawn: int = 0
    aborted: bool = False


class ManualExecutor(Executor):
    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.jobs.append((lambda: fn(*args, **kwargs), future))
        return future

    def run(self, index: int = 0) -> None:
        job, future = self.jobs.pop(index)
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.jobs.clear()


class World:
    """`held[bundle]` is what the control plane believes the job holds; `messages` it sent that have not arrived."""

    def __init__(self, replicas: int = 3, slots: int = 4) -> None:
        self.cluster = Cluster("actor_infer", 1, tuple(range(replicas)))
        self.calls: list[Call] = []
        self.alive = [True] * replicas
        self.lives = [0] * replicas
        self.resident = [False] * replicas
        self.running: list[dict[str, Running]] = [{} for _ in range(replicas)]
        self.counters = [DecodingCounters() for _ in range(replicas)]
        self.version = [-1] * replicas
        self.held: dict[int, Lease] = {}
        self.draining: set[int] = set()
        self.messages: list[tuple[str, Lease]] = []
        self.acks: dict[int, Future[None]] = {}
        self.epochs = itertools.count(1)
        self.demands: list[Demand] = []
        self.spans_written = 0
        self.now = 0.0
        self.background = ManualExecutor()
        self.router = Router(replicas, slots)
        self.manager = RolloutManager(
            self.cluster,
            replicas=self,
            router=self.router,
            client=self,
            folder=self,  # type: ignore[arg-type]
            clock=lambda: self.now,
            background=self.background,
            threaded=False,
        )

    # ---- the replicas ----------------------------------------------------------------------------------------

    @property
    def processes(self) -> Mapping[int, Process]:
        return {rank: Process("node", rank, self.lives[rank]) for rank in range(len(self.alive))}

    def call(self, method: str, *args: Any, ranks: Sequence[int]) -> list[Any]:
        (rank,) = ranks
        call = Call(rank, method, args)
        if not self.alive[rank]:
            self.calls.append(call)
            return [call]
        if method == "abort":
            (ids,) = args
            for id, running in self.running[rank].items():
                running.aborted |= ids is None or id in ids
            call.answer.set_result(None)
            return [call]
        assert rank in self.held, f"{method} on replica {rank}, which has no lease"
        if method in ("load", "offload"):
            assert args[-1].epoch == self.held[rank].epoch, f"{method} under a lease that has ended"
        if method == "load":
            self.resident[rank] = True
        else:
            assert self.resident[rank], f"{method} on a replica that is not loaded"
        if method == "start":
            assert not [c for c in self.calls if c.rank == rank and c.method in ("load", "offload")]
            for request in args[0]:
                assert request.id not in self.running[rank], f"{request.id} was started twice on replica {rank}"
                self.running[rank][request.id] = Running(request)
        if method == "collect":
            assert not [c for c in self.calls if c.rank == rank and c.method == "collect"]
        if method == "offload":
            assert not self.running[rank], f"offload of replica {rank} while it works on {sorted(self.running[rank])}"
        self.calls.append(call)
        return [call]

    def kill(self, rank: int) -> None:
        self.alive[rank] = self.resident[rank] = False
        self.running[rank].clear()
        self.counters[rank] = DecodingCounters()
        for call in [c for c in self.calls if c.rank == rank]:
            self.fail(call, ActorDiedError(f"replica {rank} died"))

    def restart(self, rank: int) -> None:
        self.kill(rank)
        self.alive[rank] = True
        self.lives[rank] += 1

    def fail(self, call: Call, error: Exception) -> None:
        self.calls.remove(call)
        call.answer.set_exception(error)

    def refuse(self, rank: int, reason: str) -> None:
        """Answer the replica's `collect`: everything it was given can never be answered."""
        (call,) = [c for c in self.calls if c.rank == rank and c.method == "collect"]
        self.calls.remove(call)
        ids = tuple(self.running[rank])
        self.running[rank].clear()
        call.answer.set_result(Collected((), self.counters[rank], ((ids, reason),)))

    def finish(self, call: Call, counts: Sequence[int] | None = None) -> None:
        """Let a call return. A `collect` brings `counts` tokens for each of the replica's requests; None: all."""
        if not self.alive[call.rank]:
            self.fail(call, ActorDiedError(f"replica {call.rank} died"))
            return
        self.calls.remove(call)
        result: Any = None
        if call.method in ("load", "update"):
            self.version[call.rank] = call.args[0].version
        elif call.method == "offload":
            self.resident[call.rank] = False
        elif call.method == "collect":
            result = self._collected(call.rank, counts)
        call.answer.set_result(result)

    def _collected(self, rank: int, counts: Sequence[int] | None) -> Collected:
        given = iter(counts or ())
        chunks, steps, tokens, before = [], 0, 0, self.counters[rank]
        for id, running in list(self.running[rank].items()):
            count = next(given, 0) if counts is not None or running.aborted else running.request.max_new_tokens
            piece = chunk(running.request, running.drawn, count, self.version[rank], aborted=running.aborted)
            running.drawn += len(piece.token_ids)
            steps, tokens = max(steps, len(piece.token_ids)), tokens + len(piece.token_ids)
            if piece.finish_reason is not None:
                del self.running[rank][id]
            chunks.append(piece)
        self.counters[rank] = DecodingCounters(
            before.steps + steps, self.now, before.tokens + tokens, running=len(self.running[rank])
        )
        return Collected(tuple(chunks), self.counters[rank])

    # ---- the control plane's side ----------------------------------------------------------------------------

    def report_demand(self, cluster: str, demand: Demand) -> None:
        self.demands.append(demand)

    def name_holders(self, cluster: str, processes: Mapping[int, Process]) -> None:
        assert all(self.processes[rank] == process for rank, process in processes.items())

    def fence(self, lease: Lease) -> Fence:
        return Fence("pool", lease.epoch)

    def release(self, lease: Lease) -> None:
        if self.held.get(lease.bundle or 0) != lease:
            raise StaleEpochError("not held")
        self.end(lease)

    def leases(self) -> tuple[LeaseStatus, ...]:
        return tuple(LeaseStatus(lease, LeaseState.ACTIVE) for lease in self.held.values())

    def end(self, lease: Lease) -> None:
        assert lease.bundle is not None
        assert not self.resident[lease.bundle], f"lease {lease.epoch} ended while its device holds bytes"
        del self.held[lease.bundle]
        self.draining.discard(lease.bundle)

    def grant(self, bundle: int) -> Lease:
        lease = Lease(next(self.epochs), "ft_1", "actor_infer", Phase.ROLLOUT, (bundle,), bundle)
        self.held[bundle] = lease
        self.messages.append(("grow", lease))
        return lease

    def ask_back(self, bundle: int) -> None:
        self.draining.add(bundle)
        self.messages.append(("shrink", self.held[bundle]))

    def take_by_force(self, bundle: int) -> None:
        """What the control plane does after a deadline: kill, end the lease, tell the job."""
        lease = self.held[bundle]
        self.kill(bundle)
        self.end(lease)
        self.messages.append(("lost", lease))

    def deliver(self, index: int = 0) -> None:
        kind, lease = self.messages.pop(index)
        if kind == "grow":
            self.manager.grow([lease])
        elif kind == "lost":
            self.manager.lost([lease])
        else:
            (ack,) = self.manager.request_shrink([lease])
            self.acks[lease.epoch] = ack
            ack.add_done_callback(lambda _: self.end(lease) if self.held.get(lease.bundle or 0) == lease else None)
        self.manager.handle_posted()

    # ---- driving ---------------------------------------------------------------------------------------------

    def spans(self, spans: Sequence[Any]) -> None:
        self.spans_written += len(spans)

    def settle(self, *, calls: bool = True) -> None:
        """Until nothing moves any more."""
        for _ in range(10_000):
            self.manager.handle_posted()
            if self.messages:
                self.deliver()
            elif self.background.jobs:
                self.background.run()
            elif calls and self.calls:
                self.finish(self.calls[0])
            else:
                return
        raise AssertionError("the rollout never comes to rest")


def trajectory(name: str, length: int) -> Trajectory:
    return Trajectory(name, prompt_ids=(1, 2), seed=len(name), sampling=Sampling(max_new_tokens=length))


def chunk(
    request: GenerationRequest, drawn: int, count: int, version: int = 0, *, aborted: bool = False
) -> GenerationChunk:
    """Token `p` of every trajectory is `p`, so a doubled or dropped token shows."""
    start = len(request.generated_ids) + drawn
    end = min(start + count, request.max_new_tokens)
    tokens = tuple(range(start, end))
    reason = "length" if end == request.max_new_tokens else "abort" if aborted else None
    return GenerationChunk(request.id, tokens, tuple(-0.5 for _ in tokens), reason, (version,) * len(tokens))


def collected(*chunks: GenerationChunk, counters: DecodingCounters | None = None) -> Collected:
    return Collected(chunks, counters or DecodingCounters())
