"""Between a rollout's lease and the rollout manager: bundles in as they come, and back when their memory is free."""

import logging
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from rlix.control.client import JobClient
from rlix.control.rollout_lease import Granted, Lost, Taken
from rlix.engine.inference.engine import InferenceEngine
from rlix.node.run_folder import RunFolder
from rlix.pipeline.rollout.rollout import RolloutManager
from rlix.pipeline.rollout.router import Router
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Cluster, Demand, Fence, Lease, LeaseStatus, Process

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0


class BundleFeed:
    """What a `RolloutManager` needs of the control plane, for one elastic cluster; `feed` begins to bring bundles."""

    def __init__(self, client: JobClient, cluster: str) -> None:
        self._client = client
        self._rollout = client.rollout(cluster)
        self._stop = threading.Event()
        self._giving = ThreadPoolExecutor(1, "give-back")
        self._freed: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # ---- for the manager -------------------------------------------------------------------------------------

    def report_demand(self, cluster: str, demand: Demand) -> None:
        self._rollout.report(demand)

    def release(self, lease: Lease) -> None:
        if lease.cluster == self._rollout.cluster:  # else it is a gang, of which this is one bundle of several
            self._rollout.give_back(lease)

    def name_holders(self, cluster: str, processes: Mapping[int, Process]) -> None:
        self._client.name_holders(cluster, processes)

    def leases(self) -> tuple[LeaseStatus, ...]:
        return self._client.leases()

    def fence(self, lease: Lease) -> Fence:
        return self._client.fence(lease)

    @property
    def usable(self) -> tuple[Lease, ...]:
        """The bundles that may be used now."""
        return self._rollout.leases

    # ---- from the control plane ------------------------------------------------------------------------------

    def feed(self, manager: RolloutManager) -> None:
        """Bring every change of the bundles to `manager`, in a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._run, args=(manager,), name="bundles", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        self._giving.shutdown(wait=False, cancel_futures=True)

    def leave(self) -> None:
        """After `close`, when nothing is on a device: give back what is still held. A second call changes nothing."""
        if not self._rollout.closed:
            with self._rollout:
                pass

    def _run(self, manager: RolloutManager) -> None:
        try:
            for change in self._rollout.changes(self._stop):
                match change:
                    case Granted(lease):
                        manager.grow([lease])
                    case Taken(lease):
                        (ack,) = manager.request_shrink([lease])
                        ack.add_done_callback(partial(self._acknowledged, lease))
                    case Lost(lease):
                        manager.lost([lease])
        except RlixError as error:
            if not self._stop.is_set():
                logger.error("no bundles come or go any more: %s", error)
                manager.fail(error)

    def _acknowledged(self, lease: Lease, ack: "Future[None]") -> None:
        if ack.exception() is None:
            self._freed.put(lease)
            self._giving.submit(self._give_back)
        # Else the job is ending, and with it its replicas: their death frees the device.

    def _give_back(self) -> None:
        """All that is free by now, in one call."""
        leases = []
        while not self._freed.empty():
            leases.append(self._freed.get())
        if not leases:
            return
        try:
            self._rollout.give_back(*leases)
        except RlixError as error:
            logger.warning("leases %s were not given back: %s", [lease.epoch for lease in leases], error)


def started(
    engine: InferenceEngine, cluster: Cluster, client: JobClient, slots: int, folder: RunFolder
) -> tuple[RolloutManager, BundleFeed]:
    """The engine's replicas, one for each bundle of the elastic cluster and none of them loaded, as a rollout.

    Both are to be closed, the feed first.
    """
    router = Router(len(cluster.bundles), slots, prefix_cache=engine.backend.prefix_cache)
    bundles = BundleFeed(client, cluster.name)
    manager = RolloutManager(cluster, replicas=engine.replicas, router=router, client=bundles, folder=folder)
    bundles.feed(manager)
    return manager, bundles
