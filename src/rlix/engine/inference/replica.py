"""A replica: one executor on the devices of one bundle, as an actor."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from rlix.engine.executors.base import ALL_PARTS, Executor, ExecutorOptions, Part
from rlix.engine.inference.replica_state import ReplicaPhase, ReplicaState
from rlix.engine.inference.requests import GenerationChunk, GenerationRequest, GenerationResult
from rlix.engine.model_source import ModelSource
from rlix.engine.weights.channel import Ticket
from rlix.engine.weights.layout import Layout
from rlix.engine.weights.publication import PublishedWeights
from rlix.flow.worker import LOCK_TIMEOUT_S, Worker
from rlix.protocol.errors import WaitTimeoutError
from rlix.protocol.messages import DeviceKind, Fence

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a move or an update did.

    Attributes:
        version: of the weights; -1 means those of the model's folder.
        bytes: moved, copied or released.
        device_bytes: what the replica holds on its devices now.
    """

    phase: ReplicaPhase
    version: int
    bytes: int
    seconds: float
    device_bytes: int


class Replica(Worker):
    """Generates for any number of concurrent calls on the devices of one bundle, while it has the right to.

    Its methods are coroutines: a `generate` in progress holds no thread, so an `abort` is never queued behind it.
    """

    def __init__(self, source: ModelSource, executor: str, options: ExecutorOptions) -> None:
        disable_progress_bar()  # of every replica, they would run through each other on the user's terminal
        self._executor = make_executor(executor, source, options, self.ctx.kind, self.ctx.rendezvous)
        self._state = ReplicaState()
        self._locks = self.ctx.device_locks()
        self._moving = asyncio.Lock()
        self._generating: set[asyncio.Future[Any]] = set()

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
            before, self._state = self._state, self._state.load(fence.epoch)
            try:
                await asyncio.to_thread(self._hold, fence)
            except BaseException:  # re-raised; nothing was moved
                self._state = before
                raise
            if before.phase is ReplicaPhase.READY and (weights is None or weights.version == self._executor.version):
                self._state = self._state.loaded()
                return self._report(0, 0.0)
            report = await self._move(lambda: self._executor.load(weights, parts))
            if Part.KV_CACHE in parts:
                self._state = self._state.loaded()
            return self._report(report.bytes, report.seconds)

    async def update(self, weights: PublishedWeights) -> ReplicaReport:
        """Replace the weights in place; requests in flight go on with the new ones."""
        async with self._moving:
            self._state.check_resident()
            mine = weights.received_by(replica=self.ctx.rank)
            return await self._move(lambda: self._executor.update(mine))

    async def weight_layouts(self, offered: PublishedWeights) -> list[Layout]:
        """What each of the executor's workers needs of a trainer's tensors.

        Raises:
            NotResidentError: the weights are not on the devices. WeightSyncError: they do not fit.
        """
        async with self._moving:
            self._state.check_resident()
            return await asyncio.to_thread(self._executor.weight_layouts, offered)

    async def join_channel(self, tickets: Sequence[Ticket]) -> None:
        """Take the workers' ends of a channel. Raises WaitTimeoutError: a member did not come; names whom."""
        await asyncio.to_thread(self._executor.join_channel, tickets)

    async def leave_channel(self, channel: str) -> None:
        await asyncio.to_thread(self._executor.leave_channel, channel)

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
        future = self._submit(requests, lambda chunk: _post(loop, arrived, chunk))
        future.add_done_callback(lambda _: arrived.put_nowait(None))
        while (chunk := await arrived.get()) is not None:
            chunks = [chunk]
            while not arrived.empty() and (further := arrived.get_nowait()) is not None:
                chunks.append(further)
            yield chunks
            if future.done() and arrived.empty():
                break
        await future  # its error, if it has one

    def _submit(
        self, requests: Sequence[GenerationRequest], on_chunk: Callable[[GenerationChunk], None] | None
    ) -> "asyncio.Future[list[GenerationResult]]":
        self._state.check_ready()
        future = asyncio.wrap_future(self._executor.submit(requests, on_chunk))
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
            self._state = self._state.drain(self.ctx.fence(lease).epoch)
            report = await self._move(lambda: self._offload(keep_host))
            self._state = self._state.off()
            return self._report(report.bytes, report.seconds)

    async def report(self) -> ReplicaReport:
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
        self._executor.share_locks(self._locks.keys, None)
        self._locks.release()
        return released

    def close(self) -> None:
        """The devices stay locked until the process, and any it started, has ended: the bytes do too."""
        self._state = self._state.dead()
        self._executor.close()

    async def _move(self, move: Callable[[], int]) -> ReplicaReport:
        """Run a blocking move beside the event loop; a failure leaves the replica dead until it is loaded again."""
        start = time.perf_counter()
        try:
            if self._state.phase is ReplicaPhase.DRAINING:
                await self._end_generating()
            moved = await asyncio.to_thread(move)
        except BaseException:  # re-raised; a cancelled move has left undefined bytes as well
            self._state = self._state.dead()
            raise
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
        return ReplicaReport(self._state.phase, self._executor.version, moved, seconds, self._executor.device_bytes)


def _post(
    loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[GenerationChunk | None]", chunk: GenerationChunk
) -> None:
    loop.call_soon_threadsafe(queue.put_nowait, chunk)


def make_executor(
    name: str, source: ModelSource, options: ExecutorOptions, kind: DeviceKind, scratch: str | None
) -> Executor:
    """`scratch` is a folder for temporary files that goes with the replica's group, even if the replica is killed.

    Raises ValueError for a name that is no executor.
    """
    if name == "transformers":
        from rlix.engine.executors.transformers import TransformersExecutor

        return TransformersExecutor(source, options, torch.device("cuda" if kind is DeviceKind.CUDA else "cpu"))
    if name == "vllm":
        from rlix.engine.executors.vllm import VllmExecutor

        return VllmExecutor(source, options, kind, scratch)
    raise ValueError(f'executor is {name!r}; it must be "transformers" or "vllm"')
