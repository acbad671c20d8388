"""A replica: one executor on the devices of one bundle, as an actor."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers.utils.logging import disable_progress_bar

from rlix.engine.declared import Deadlines
from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions, InferenceExecutor, Site
from rlix.engine.executors.registry import Backend
from rlix.engine.inference.requests import Collected, GenerationChunk, GenerationRequest, GenerationResult
from rlix.engine.life_cycle import Life, Part, Phase, Residency
from rlix.engine.model_source import ModelSource
from rlix.engine.residency import MoveReport
from rlix.engine.weights.publication import PublishedWeights
from rlix.protocol.errors import WaitTimeoutError
from rlix.protocol.messages import Device, Fence
from rlix.workers.worker import LOCK_TIMEOUT_S, Worker

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 60.0
GATHER_S = 0.02  # what ends soon after another is told with it; the trajectories to spare bridge that time
REPORT_EVERY_S = 1.0  # how many seconds of tokens are lost, at most, when a replica is killed


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a move or an update did.

    Attributes:
        life: where its bytes are, which weights these are, and under which lease.
        bytes: moved, copied or released.
        device_bytes: what the replica holds on its devices now.
    """

    life: Life
    bytes: int
    seconds: float
    device_bytes: int

    @property
    def moved(self) -> MoveReport:
        return MoveReport(self.bytes, self.seconds)

    @property
    def phase(self) -> Phase:
        return self.life.phase

    @property
    def version(self) -> int:
        return self.life.version


class Replica(Worker):
    """Generates for any number of concurrent calls on the devices of one bundle, while it has the right to.

    Its methods are coroutines: a `generate` in progress holds no thread, so an `abort` is never queued behind it. Its
    state is its executor's `life`; what the replica adds are the leases and the devices' locks.
    """

    def __init__(
        self,
        source: ModelSource,
        backend: str | type[InferenceExecutor],
        options: ExecutorOptions,
        further: tuple[tuple[Device, ...], ...] = (),
    ) -> None:
        """`further`: the bundle's devices on other nodes than this one, node by node."""
        disable_progress_bar()  # of every replica, they would run through each other on the user's terminal
        self._locks = self.ctx.device_locks()
        name = f"{self.ctx.group}:{self.ctx.rank}"
        site = Site(self.ctx.kind, self._locks.keys, self.ctx.rendezvous, further, name, self.ctx.namespace)
        self._executor: InferenceExecutor = Backend(backend).load()(source, options, site)
        self._declared = options.declared
        self._moving = asyncio.Lock()
        self._generating: set[asyncio.Future[Any]] = set()
        self._arrived = asyncio.Event()
        self._chunks: list[GenerationChunk] = []
        self._refused: list[tuple[tuple[str, ...], str]] = []
        self._failure: BaseException | None = None

    async def load(
        self, weights: PublishedWeights | None, lease: Fence | int | None, parts: Sequence[Part] = ALL_PARTS
    ) -> ReplicaReport:
        """Bring `parts` onto the devices, with `weights` or else those it had or came with.

        Args:
            lease: under which, given by its fence or its epoch; None: on the program's own account.

        Raises:
            StaleEpochError: that lease, or a later one, has already been offloaded, or the devices had a later one.
            DeviceBusyError: somebody else has bytes on a device; names the process and its job.
            NotResidentError: there are no weights to load. WeightSyncError: they do not fit.
        """
        async with self._moving:
            fence = self.ctx.fence(lease)
            before = self._executor.life
            self._executor.change(lambda life: life.enter(fence.epoch))
            try:
                await asyncio.to_thread(self._hold, fence)
            except BaseException:  # re-raised; nothing was moved
                self._executor.change(lambda life: replace(life, epoch=before.epoch))
                await self._let_go_of_nothing()
                raise
            try:
                return await self._move(lambda: self._executor.load(weights, parts), self._declared.expand_s)
            except BaseException:  # re-raised
                await self._let_go_of_nothing()
                raise

    async def update(self, weights: PublishedWeights) -> ReplicaReport:
        """Replace the weights in place; requests in flight go on with the new ones."""
        async with self._moving:
            return await self._move(lambda: self._executor.update(weights), self._declared.sync_s)

    async def check_update(self, weights: PublishedWeights) -> None:
        """Raise the NotResidentError or WeightSyncError with which `update` would refuse."""
        async with self._moving:
            await asyncio.to_thread(self._executor.check_update, weights)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """The results, in order, when all requests are finished or aborted.

        Raises:
            NotResidentError: the replica is not ready. ValueError: a request can never be answered; it is named.
        """
        return await self._submit(requests, None)

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationChunk]]:
        """What `generate` would return, piece by piece: a list with all that was added since the last one.

        Raises:
            As `generate`.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[GenerationChunk | None] = asyncio.Queue()
        future = self._submit(requests, lambda chunk: loop.call_soon_threadsafe(arrived.put_nowait, chunk))
        future.add_done_callback(lambda _: arrived.put_nowait(None))
        while (chunk := await arrived.get()) is not None:
            chunks = [chunk]
            while not arrived.empty() and (further := arrived.get_nowait()) is not None:
                chunks.append(further)
            yield chunks
            if future.done() and arrived.empty():
                break
        await future  # its error, if it has one

    async def start(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin to generate; `collect` brings what comes of it.

        Where one adapter's requests are refused the others' go on.

        Raises:
            NotResidentError: the replica is not ready.
        """
        loop = asyncio.get_running_loop()
        for adapter in dict.fromkeys(request.adapter for request in requests):
            own = [request for request in requests if request.adapter == adapter]
            future = self._submit(own, lambda chunk: loop.call_soon_threadsafe(self._take, chunk), REPORT_EVERY_S)
            future.add_done_callback(partial(self._started_ended, tuple(request.id for request in own)))

    async def collect(self, timeout_s: float) -> Collected:
        """What the requests of `start` have got since the last call; waits `timeout_s` for anything to come.

        A request that ends is in it within `GATHER_S`, the tokens of the others every `REPORT_EVERY_S`. What is
        collected is told once: whoever loses the answer asks another replica for those tokens again, and is given
        the same.

        Raises:
            Whatever made the executor fail: nothing of what was started goes on.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
                if self._generating:
                    await asyncio.sleep(GATHER_S)
        self._arrived.clear()
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure
        chunks, self._chunks = self._chunks, []
        refused, self._refused = self._refused, []
        return Collected(tuple(chunks), self._executor.counters, tuple(refused))

    def _take(self, chunk: GenerationChunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()

    def _started_ended(self, ids: tuple[str, ...], done: "asyncio.Future[list[GenerationResult]]") -> None:
        if done.cancelled() or (error := done.exception()) is None:
            return
        if isinstance(error, ValueError):  # the requests' fault, not the replica's
            self._refused.append((ids, str(error)))
        else:
            self._failure = error
        self._arrived.set()

    def _submit(
        self,
        requests: Sequence[GenerationRequest],
        on_chunk: Callable[[GenerationChunk], object] | None,
        every_s: float = 0.0,
    ) -> "asyncio.Future[list[GenerationResult]]":
        self._executor.life.check_accepting("this replica")
        future = asyncio.wrap_future(self._executor.submit(requests, on_chunk, every_s))  # cancelled with its caller
        self._generating.add(future)
        future.add_done_callback(self._generating.discard)
        return future

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all); their `generate` returns early with the tokens they have."""
        await asyncio.to_thread(self._executor.abort, request_ids)

    async def offload(self, lease: Fence | int | None, keep_host: bool = False) -> ReplicaReport:
        """Abort what is in flight and release the device memory; from now on `lease` is over for this replica.

        Raises:
            StaleEpochError: the replica works under a later lease.
            WaitTimeoutError: requests did not end within `DRAIN_TIMEOUT_S`.
        """
        async with self._moving:
            epoch = self.ctx.fence(lease).epoch
            self._executor.change(lambda life: life.drain(epoch))
            try:
                await self._end_generating()
                return await self._move(lambda: self._offload(keep_host), self._declared.shrink_s)
            except BaseException as error:  # re-raised; it is not draining any more, and may be loaded or drained again
                reason = f"offload broke off: {error}"
                self._executor.change(lambda life: life.failed(reason) if life.draining else life)
                raise

    async def report(self) -> ReplicaReport:
        """What is so once the move in progress has ended."""
        async with self._moving:
            return self._report(0, 0.0)

    def _hold(self, fence: Fence) -> None:
        """Lock the devices before a byte is there, for the executor's own processes too."""
        before = self._locks.fence
        if before not in (None, fence):
            self._executor.share_locks(self._locks.keys, None)  # or they would keep the devices under the old fence
        try:
            self._locks.acquire(fence, LOCK_TIMEOUT_S)
        finally:
            self._executor.share_locks(self._locks.keys, self._locks.fence)

    def _offload(self, keep_host: bool) -> int:
        released = self._executor.offload(keep_host=keep_host)
        self._let_go()
        return released

    def _let_go(self) -> None:
        """After the last byte has gone."""
        self._executor.share_locks(self._locks.keys, None)
        self._locks.release()

    async def _let_go_of_nothing(self) -> None:
        """After a load that failed: where nothing came, nothing is held."""
        after = self._executor.life
        if after.phase is Phase.OFF or after.residency is Residency.HOST:  # which may count as failed
            await asyncio.to_thread(self._let_go)

    def close(self) -> None:
        """The devices stay locked until the process, and any it started, has ended: the bytes do too."""
        self._executor.close()

    async def _move(self, move: Callable[[], int], declared_s: float) -> ReplicaReport:
        """Run a blocking move beside the event loop; what became of it the executor's life says."""
        start = time.perf_counter()
        moved = await asyncio.to_thread(move)
        if moved:
            await asyncio.to_thread(Deadlines().reach, start, declared_s)
        return self._report(moved, time.perf_counter() - start)

    async def _end_generating(self) -> None:
        await self.abort(None)
        if self._generating:
            _, late = await asyncio.wait(self._generating, timeout=DRAIN_TIMEOUT_S)
            if late:
                raise WaitTimeoutError(
                    f"{len(late)} generate() calls did not end within {DRAIN_TIMEOUT_S:g} s of abort"
                )

    def _report(self, moved: int, seconds: float) -> ReplicaReport:
        return ReplicaReport(self._executor.life, moved, seconds, self._executor.device_bytes)
