"""`WorkerGroup`: the one place that creates Ray actors for device work."""

import asyncio
import logging
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlix.node import output
from rlix.node.process import WatchedProcess, descendants, kill
from rlix.protocol.errors import SpecError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, Process
from rlix.workers import prefork
from rlix.workers.actor_class import actor_class, may_be_made_again
from rlix.workers.futures import failures, futures_of, read_error
from rlix.workers.once import CALL
from rlix.workers.per_rank import check_per_rank, pick
from rlix.workers.placement import check_placements
from rlix.workers.scratch import Scratch
from rlix.workers.user_errors import failure, sent
from rlix.workers.worker import CONTROL, WORKER_ENVIRONMENT, Worker, WorkerContext, program_fence

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0  # until every rank has been constructed
EXIT_TIMEOUT_S = 10.0  # for a killed process to be gone
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class WorkerGroup:
    """Ranks `0..n-1` of one worker class, each a Ray actor on the devices of its placement.

    Args:
        worker_cls: a subclass of `Worker`.
        name: names the actors `"{name}:{rank}"`.
        placements: the devices of each rank, all on one node; an empty tuple is a CPU worker anywhere.
        kwargs: passed to the worker's `__init__`; a `PerRank` value differs per rank.
        env: environment variables, set before the interpreter imports anything.
        start: "fork" from the node's preloaded server, or "spawn" a plain interpreter.
        max_concurrency: methods of one rank that may run at once; 1 makes them run in the order they were called.
        cpu_threads: torch threads of a rank without CUDA devices.

    Blocks until every rank is constructed; from async code use `await asyncio.to_thread(WorkerGroup, ...)`.

    Raises:
        WorkerError: a rank failed to start or raised in `__init__`; nothing is left behind.
        WaitTimeoutError: ranks, which are named, did not start within `start_timeout_s`; nothing is left behind.
    """

    def __init__(
        self,
        worker_cls: type[Worker],
        *,
        name: str,
        placements: Sequence[tuple[Device, ...]],
        kwargs: Mapping[str, Any] | None = None,
        namespace: str | None = None,
        env: Mapping[str, str] | None = None,
        start: Literal["fork", "spawn"] = "fork",
        max_concurrency: int = 8,
        cpu_threads: int = 1,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        check_placements(name, placements)
        if not ray.is_initialized():
            raise WorkerError(f"{name}: there is no Ray to start workers in: call rlix.init() first")
        self.name = name
        self.placements = tuple(tuple(placement) for placement in placements)
        self.worker_cls = worker_cls
        self._kwargs = dict(kwargs or {})
        remote = ray.remote(concurrency_groups={CONTROL: 1})
        self._cls: Any = remote(actor_class(worker_cls))
        self._cpu_threads = cpu_threads
        self._start_timeout_s = start_timeout_s
        self._group_id = uuid.uuid4().hex
        environment = {**WORKER_ENVIRONMENT, **(env or {})}
        fork = start == "fork" and prefork.available()
        self._options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_concurrency": max_concurrency,
            "runtime_env": (prefork.runtime_env if fork else prefork.plain_runtime_env)(environment),
        }
        if namespace is not None:
            self._options["namespace"] = namespace
        self._handles: list[ActorHandle[Any]] = []
        self._processes: dict[int, WatchedProcess] = {}
        self._named: dict[int, Process] = {}
        self._children: dict[int, set[Process]] = {}  # of ranks that are being killed: found while these are there
        self.lost: set[int] = set()  # ranks of which it is known that they have died, and not been started again
        self._closed = False
        # A folder for process groups, when every rank is on this node.
        scratch = Scratch(name) if _on_this_node(self.placements) else None
        self._rendezvous = scratch.name if scratch else None
        # Also when a program ends without having closed the group.
        self._forget_rendezvous = weakref.finalize(self, scratch.cleanup if scratch else lambda: None)
        try:
            for rank in range(self.world_size):
                self._handles.append(self._create(rank))
            self._construct(range(self.world_size))
        except ActorAlreadyExistsError as error:
            self.close(timeout_s=EXIT_TIMEOUT_S, graceful=False)
            raise WorkerError(f"{name}: workers of this name are there: close them, or give another name") from error
        except BaseException:  # raised again; whatever it is, Ctrl-C too, no worker is left behind
            self.close(timeout_s=EXIT_TIMEOUT_S, graceful=False)
            raise

    @property
    def world_size(self) -> int:
        return len(self.placements)

    @property
    def processes(self) -> dict[int, Process]:
        """The process of each rank that was constructed, as it is known on its node."""
        return {rank: replace(process, name=f"{self.name}:{rank}") for rank, process in self._named.items()}

    @property
    def handles(self) -> tuple["ActorHandle[Any]", ...]:
        return tuple(self._handles)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any
    ) -> "list[ray.ObjectRef[Any]]":
        """Call `method` on `ranks` (default: all) and return their futures, in the order of `ranks`.

        An argument that is large and the same for all ranks is best passed as `ray.put(argument)`.
        """
        return self.submit(method, args, kwargs, ranks=ranks)

    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NO_ARGUMENTS,
        *,
        ranks: Sequence[int] | None = None,
        at_once: bool = False,
    ) -> "list[ray.ObjectRef[Any]]":
        """`call` with arguments of any names.

        `at_once`: beside the method that runs, even where one runs at a time and this one hangs.
        """
        self.check_usable(method)
        called = self._ranks(ranks)
        check_per_rank(f"{self.name}: {method}()", len(called), args, kwargs)
        options = {"concurrency_group": CONTROL} if at_once else {}
        values = [*((f"argument {i}", value) for i, value in enumerate(args, 1)), *kwargs.items()]
        with sent(f"{self.name}: {method}()", values):
            return [
                self._remote(
                    rank,
                    method,
                    [pick(value, i) for value in args],
                    {key: pick(value, i) for key, value in kwargs.items()},
                    options,
                )
                for i, rank in enumerate(called)
            ]

    def _remote(
        self,
        rank: int,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NO_ARGUMENTS,
        options: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> "ray.ObjectRef[Any]":
        """A connection to another host may be lost for a while: Ray then makes the call again, as long as it counts the
        worker, which carries it out once."""
        found = getattr(self._handles[rank], method)
        call: Any = found.options(**options) if options else found
        if not _on_this_node(self.placements[rank : rank + 1]) and may_be_made_again(self.worker_cls, method):
            call, kwargs = found.options(max_task_retries=-1, **options), {**kwargs, CALL: uuid.uuid4().hex}
        made: ray.ObjectRef[Any] = call.remote(*args, **kwargs)
        return made

    def check_usable(self, method: str) -> None:
        """Raise WorkerError when there is nobody to call, SpecError when they have no such method."""
        if self._closed:
            raise WorkerError(f"{self.name}: {method}() called on a closed group")
        if not ray.is_initialized():  # or Ray would start itself anew
            raise WorkerError(
                f"{self.name}: {method}() called after Ray was shut down, and with it these workers: call rlix.init() "
                "and build them again"
            )
        if not callable(getattr(self.worker_cls, method, None)):
            there = ", ".join(n for n in dir(self.worker_cls) if n[0] != "_" and callable(getattr(self.worker_cls, n)))
            raise SpecError(f"{self.name}: {self.worker_cls.__name__} has no method {method}(); it has {there}")

    def run(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `method` on `ranks` (default: all) and return their results, in the order of `ranks`.

        Raises:
            WorkerError: a rank raised or died; raised as soon as the first one does, with the cause as `__cause__`.
                What a method raised is also of its own type (`except ValueError`); `rank` is an attribute.
            WaitTimeoutError: ranks, which are named, did not answer within `timeout_s`.
        """
        return self.results(method, self.call(method, *args, ranks=ranks, **kwargs), timeout_s=timeout_s, ranks=ranks)

    def results(
        self,
        method: str,
        called: "Sequence[ray.ObjectRef[Any]]",
        *,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Wait for what `call` returned; `method` is what errors name. Raises what `run` raises."""
        return self._wait(method, self._ranks(ranks), futures_of(called), timeout_s)

    async def arun(
        self, method: str, *args: Any, timeout_s: float, ranks: Sequence[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """`run` for async code: the event loop goes on."""
        called = self._ranks(ranks)
        futures = futures_of(self.call(method, *args, ranks=called, **kwargs))
        failed = failures(futures)
        waiting = [asyncio.wrap_future(future) for future in futures]
        for waiter in waiting:
            waiter.add_done_callback(read_error)
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        return self._collect(method, called, futures, failed, timeout_s)

    def restart(self, rank: int) -> None:
        """Replace `rank` by a newly constructed worker of the same name on the same devices; kills the old one."""
        self.kill(rank)
        self._handles[rank] = self._create_again(rank)
        self._construct([rank])
        self.lost.discard(rank)

    def kill(self, rank: int, *, timeout_s: float = EXIT_TIMEOUT_S) -> None:
        """Kill the worker, whatever it is doing, and wait until its process is gone, and those that it started.

        Raises:
            WaitTimeoutError: one of them did not end within `timeout_s`; they are named.
        """
        process = self._processes.get(rank)
        if process is not None:
            self._children.setdefault(rank, set()).update(descendants(self._named[rank]))
        ray.kill(self._handles[rank])
        deadline = time.monotonic() + timeout_s
        if process is not None and not process.wait(deadline):
            raise WaitTimeoutError(f"{self.name}: rank {rank} did not end within {timeout_s:g} s of being killed")
        children = tuple(self._children.get(rank, ()))  # another thread may be at the same
        if alive := kill(children, max(0.0, deadline - time.monotonic())):
            raise WaitTimeoutError(
                f"{self.name}: rank {rank} left process(es) {_join_pids(alive)}, alive {timeout_s:g} s later"
            )
        self._processes.pop(rank, None)  # asked again, it is known to be gone
        self._children.pop(rank, None)

    def has_ended(self, rank: int, within_s: float = 0.0) -> bool:
        """Whether its process is seen to be gone: of a rank on another node that is Ray's to say."""
        process = self._processes.get(rank)
        return process is not None and process.wait(time.monotonic() + within_s)

    def close(self, timeout_s: float = 10.0, *, graceful: bool = True) -> None:
        """End every worker: `Worker.close()` where it still answers, then kill. Never raises on a worker's account.

        Returns within `timeout_s` for each of the two; a process that survives both is logged.
        """
        if self._closed:
            return
        self._closed = True
        self._forget_rendezvous()
        if not ray.is_initialized():
            return
        if graceful:
            futures = futures_of([self._remote(rank, "close") for rank in range(len(self._handles))])
            wait(futures, timeout=timeout_s)
            for rank, future in enumerate(futures):
                if not future.done():
                    logger.warning("%s: rank %d did not close within %g s", self.name, rank, timeout_s)
                elif isinstance(error := future.exception(), RayTaskError):
                    logger.warning("%s: rank %d failed in close(): %s", self.name, rank, error)
        processes = dict(self._processes)  # another thread may be restarting a rank
        children = [child for rank in processes for child in descendants(self._named[rank])]
        for handle in self._handles:
            ray.kill(handle)
        deadline = time.monotonic() + timeout_s
        alive = [rank for rank, process in processes.items() if not process.wait(deadline)]
        if alive:
            logger.error("%s: the processes of rank(s) %s are still alive", self.name, listed(alive))
        if left := kill(children, max(0.0, deadline - time.monotonic())):
            logger.error("%s: process(es) %s, started by its workers, are still alive", self.name, _join_pids(left))

    def _create(self, rank: int) -> "ActorHandle[Any]":
        devices = self.placements[rank]
        context = WorkerContext(
            group=self.name,
            group_id=self._group_id,
            rank=rank,
            world_size=self.world_size,
            devices=devices,
            cpu_threads=self._cpu_threads,
            rendezvous=self._rendezvous,
            owner=program_fence(),
            namespace=self._options.get("namespace"),
            output=None if (printed := output.file()) is None else str(printed),
        )
        options = dict(self._options, name=f"{self.name}:{rank}")
        if devices:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(devices[0].node_id, soft=False)
        return self._cls.options(**options).remote(context)

    def _create_again(self, rank: int) -> "ActorHandle[Any]":
        """Ray frees the name of a killed actor a moment later."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while True:
            try:
                return self._create(rank)
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _construct(self, ranks: Sequence[int]) -> None:
        """Run the workers' `__init__`, as a method: its error then arrives with its type."""
        check_per_rank(f"{self.name}: __init__()", self.world_size, (), self._kwargs)
        with sent(self.name, self._kwargs.items()):
            futures = futures_of(
                self._remote(rank, "_rlix_construct", [{k: pick(value, rank) for k, value in self._kwargs.items()}])
                for rank in ranks
            )
        pids = self._wait("__init__", ranks, futures, self._start_timeout_s)
        here = ray.get_runtime_context().get_node_id()
        for rank, process in zip(ranks, pids, strict=True):
            self._named[rank] = process
            if process.node_id == here:
                self._processes[rank] = WatchedProcess(process.pid)

    def _wait(self, method: str, ranks: Sequence[int], futures: Sequence[Future[Any]], timeout_s: float) -> list[Any]:
        failed = failures(futures)
        wait(futures, timeout=timeout_s, return_when=FIRST_EXCEPTION)
        return self._collect(method, ranks, futures, failed, timeout_s)

    def _collect(
        self,
        method: str,
        ranks: Sequence[int],
        futures: Sequence[Future[Any]],
        failed: Sequence[int],
        timeout_s: float,
    ) -> list[Any]:
        """`failed`: numbers of those that have, in their order; one that fails now may not be among them yet."""
        for i in (*failed, *range(len(futures))):
            if futures[i].done() and (error := futures[i].exception()) is not None:
                said = failure(self.name, ranks[i], method, error)
                if isinstance(error, ActorDiedError):
                    self.lost.add(ranks[i])
                    if method != "__init__":
                        error = ActorDiedError()  # what was said tells more than Ray's page
                raise said from error
        late = [rank for rank, future in zip(ranks, futures, strict=True) if not future.done()]
        if late:
            raise WaitTimeoutError(
                f"{self.name}: rank(s) {listed(late)} did not answer {method}() within {timeout_s:g} s"
            )
        return [future.result() for future in futures]

    def _ranks(self, ranks: Sequence[int] | None) -> list[int]:
        if ranks is None:
            return list(range(self.world_size))
        for rank in ranks:
            if not 0 <= rank < self.world_size:
                raise IndexError(f"{self.name} has ranks 0..{self.world_size - 1}, not {rank}")
        return list(ranks)


def _on_this_node(placements: Sequence[tuple[Device, ...]]) -> bool:
    nodes = {device.node_id for devices in placements for device in devices}
    return nodes == {ray.get_runtime_context().get_node_id()} and all(placements)


def _join_pids(processes: Iterable[Process]) -> str:
    return listed(process.pid for process in processes)


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
