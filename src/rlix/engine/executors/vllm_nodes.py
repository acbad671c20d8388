"""vLLM over several nodes: its own multi-node executor, with a follower of the replica on each further node.

vLLM's engine runs in the replica. A follower keeps the worker processes of its node, which form one group with the
replica's own and hear the engine's calls themselves. So there is little to tell a follower: begin, lock and unlock the
devices, fetch weights for the node, end. Followers live as long as the engine. When one is lost, though, the others
may wait for it for ever, inside a collective; so the replica ends too, and Ray ends the followers of one that has.
"""

import logging
import multiprocessing
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import ray
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rlix.engine.base import plainly
from rlix.engine.executors import vllm_abi, vllm_worker
from rlix.engine.executors.base import ExecutorOptions, Site
from rlix.engine.executors.vllm_arguments import engine_arguments, model_folder
from rlix.engine.model_source import ModelSource
from rlix.engine.time_limits import folder_bytes, loading_s
from rlix.engine.weights import publication
from rlix.engine.weights.publication import PublishedWeights
from rlix.node.addresses import name_interface
from rlix.protocol.errors import RlixError, WorkerError
from rlix.protocol.messages import Fence
from rlix.workers.futures import futures_of
from rlix.workers.group import WorkerGroup
from rlix.workers.per_rank import PerRank
from rlix.workers.scratch import Scratch
from rlix.workers.worker import LOCK_TIMEOUT_S, Worker

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 600.0  # for a follower to have started, or to have fetched weights, of no size
_END_TIMEOUT_S = 10.0


class Follower(Worker):
    """A further node of a replica: vLLM's worker processes there, and what they need of the node.

    Args:
        span: of `EngineArgs`: this node's place among those of the replica.
        dummy, max_length: as for `engine_arguments`.
    """

    def __init__(
        self,
        source: ModelSource,
        options: ExecutorOptions,
        span: Mapping[str, Any],
        fence: Fence | None,
        dummy: bool,
        max_length: int,
    ) -> None:
        vllm_abi.check()
        self._locks = self.ctx.device_locks()
        self._executor: MultiprocExecutor | None = None
        self._weights: publication.NodeWeights | None = None
        self._ending = threading.Event()
        self._folder = Scratch("vllm")
        os.environ["VLLM_RPC_BASE_PATH"] = self._folder.name
        _reachable_by(ray.util.get_node_ip_address())
        config = source.load_config()
        path = model_folder(source, config, self._folder.name)
        site = Site(self.ctx.kind, self._locks.keys)
        arguments = engine_arguments(options, config, site, path, dummy=dummy, max_length=max_length)
        self._arguments = {**arguments, **span}
        self.hold(fence)

    def hold(self, fence: Fence | None) -> None:
        """Lock this node's devices, for workers that are still to come too; None: let them go.

        Raises:
            DeviceBusyError, StaleEpochError: somebody else has bytes there, or had later.
        """
        vllm_worker.announce_locks(self._locks.keys, fence)
        if fence is None:
            self._locks.release()
        else:
            self._locks.acquire(fence, LOCK_TIMEOUT_S)

    def begin(self) -> None:
        """Start the workers; returns when those of all nodes are there."""
        # As `LLMEngine` makes its own: what workers allocate depends on the context.
        config = EngineArgs(**self._arguments).create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
        self._executor = MultiprocExecutor(config)
        self._executor.register_failure_callback(lambda: _end("a vLLM worker of this node ended"))

    def stay(self) -> None:
        """Returns when this follower closes: whoever waits for it learns of any other end by an error."""
        self._ending.wait()

    def fetch(self, published: PublishedWeights) -> PublishedWeights:
        """The same with its buckets in memory that processes of this node can map, until `forget`."""
        self._weights = publication.NodeWeights(published)
        return self._weights.published

    def forget(self) -> None:
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def close(self) -> None:
        self._ending.set()
        if self._executor is not None:
            self._executor.shutting_down = True  # or it would take the workers' end for an accident
        for worker in _killed_workers():  # asked to end, they would go on waiting for the engine's next call
            worker.join(_END_TIMEOUT_S)
        self.forget()
        self._locks.release()
        self._folder.cleanup()


class FurtherNodes:
    """A replica's followers; with none, nothing happens anywhere."""

    def __init__(self, source: ModelSource, options: ExecutorOptions, site: Site) -> None:
        self._source, self._options, self._site = source, options, site
        self._group: WorkerGroup | None = None

    @contextmanager
    def starting(self, fence: Fence | None, *, dummy: bool, max_length: int) -> Iterator[Mapping[str, Any]]:
        """Inside, make vLLM's engine with these arguments besides: it begins together with the followers.

        Raises:
            DeviceBusyError, StaleEpochError: somebody else has bytes on a further node's device, or had later.
            RlixError: a follower did not begin; says why. None is left, and vLLM's engine was not made.
        """
        further = self._site.further
        if not further:
            yield {}
            return
        address = ray.util.get_node_ip_address()
        _reachable_by(address)
        span = {"nnodes": 1 + len(further), "master_addr": address, "master_port": _free_port(address)}
        begun: list[Future[Any]] = []
        try:
            self._group = self._start(span, fence, dummy=dummy, max_length=max_length)
            called = self._group.call("begin")
            begun = futures_of(called)
            for future in begun:
                future.add_done_callback(partial(self._unblock, self._group))
            for future in futures_of(self._group.call("stay")):
                future.add_done_callback(partial(self._lost, self._group))
            yield {**span, "node_rank": 0}
            size = 0 if dummy else folder_bytes(self._source.path)
            self._group.results("begin", called, timeout_s=loading_s(size, _CALL_TIMEOUT_S))
        except BaseException as error:  # raised again, or what it came of
            first = next((lost for f in begun if f.done() and (lost := f.exception()) is not None), None)
            self.close(graceful=False)
            if first is not None:
                why = getattr(first, "cause", None) or first
                raise RlixError(f"{self._site.name}: vLLM did not start on a further node: {why}") from first
            if isinstance(error, WorkerError):
                raise plainly(error) from error.__cause__
            raise

    def _start(self, span: Mapping[str, Any], fence: Fence | None, *, dummy: bool, max_length: int) -> WorkerGroup:
        places = [{**span, "node_rank": 1 + rank} for rank in range(len(self._site.further))]
        return WorkerGroup(
            Follower,
            name=f"{self._site.name}-nodes-{uuid.uuid4().hex[:4]}",
            placements=self._site.further,
            kwargs={
                "source": self._source,
                "options": self._options,
                "span": PerRank(places),
                "fence": fence,
                "dummy": dummy,
                "max_length": max_length,
            },
            namespace=self._site.namespace,
            start="spawn",
        )

    def hold(self, fence: Fence | None) -> None:
        """Have the followers lock their devices, or let them go. Raises as `Follower.hold`."""
        if self._group is not None:
            try:
                self._group.run("hold", fence, timeout_s=_CALL_TIMEOUT_S)
            except WorkerError as error:
                raise plainly(error) from error.__cause__

    @contextmanager
    def fetched(self, published: PublishedWeights) -> Iterator[Sequence[PublishedWeights]]:
        """The same for the workers of each node; each node fetches its own, once, to memory that its workers map.

        Raises:
            RlixError: they did not arrive on a node.
        """
        if self._options.tensor_parallel_size == 1:  # vLLM's worker is in this process
            yield [publication.pulled(published)]
            return
        group = self._group
        called = [] if group is None else group.call("fetch", published)
        limit_s = loading_s(published.manifest.nbytes, _CALL_TIMEOUT_S)
        try:
            with closing(publication.NodeWeights(published)) as own:
                further = [] if group is None else group.results("fetch", called, timeout_s=limit_s)
                yield [own.published, *further]
        finally:
            if group is not None:
                group.call("forget")

    def close(self, *, graceful: bool = True) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close(_END_TIMEOUT_S, graceful=graceful)

    def _unblock(self, group: WorkerGroup, begun: "Future[None]") -> None:
        """Where vLLM refuses on the other node: without the workers of this one its engine gives up too."""
        if self._group is group and begun.exception() is not None:
            _killed_workers()

    def _lost(self, group: WorkerGroup, stayed: "Future[None]") -> None:
        if self._group is group and (error := stayed.exception()) is not None:
            _end(f"{self._site.name}: a further node of this replica is lost: {error}")


def _killed_workers() -> list[BaseProcess]:
    """The worker processes that vLLM has started here, killed, whatever they waited for."""
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.kill()
    return workers


def _end(why: str) -> None:
    """End this process: what it has, and what it started, goes with it; whoever uses it learns that it is dead."""
    logger.error("%s; this process ends", why)
    os._exit(1)


def _reachable_by(address: str) -> None:
    """Have vLLM's processes of this node reached by the address that Ray knows, whatever its name resolves to."""
    os.environ["VLLM_HOST_IP"] = address
    name_interface(address)


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
