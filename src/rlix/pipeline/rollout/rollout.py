"""Elastic rollouts: replicas come and go with their leases while `generate` runs; the I/O around `Router`.

All state lives on one thread. Everything else (the training loop, the coordinator's calls, Ray's completions) posts a
callable to its inbox, so no lock is needed and the order of events is the order in which they are handled. What may
block (killing and replacing replicas, calls of the control plane) runs on background threads.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from rlix.engine.inference.requests import Collected
from rlix.engine.weights.publication import PublishedWeights
from rlix.node.run_folder import RunFolder
from rlix.pipeline.rollout.device_time import DeviceTime
from rlix.pipeline.rollout.replica_pool import ReplicaPool, Replicas, RolloutClient, RolloutError
from rlix.pipeline.rollout.router import Owner, Router, Trajectory
from rlix.pipeline.rollout.shares import Share, shares
from rlix.protocol.errors import PipelineGoneError, RlixError, WaitTimeoutError
from rlix.protocol.messages import Cluster, Demand, Lease

logger = logging.getLogger(__name__)

__all__ = ["Replicas", "RolloutClient", "RolloutError", "RolloutManager"]

_REPORT_INTERVAL_S = 1.0
_LOOK_S = 0.2  # how soon somebody who waits for trajectories notices that he should stop
_BACKGROUND_THREADS = 8


Asked = tuple[Trajectory, "Future[Trajectory]"]
"""A trajectory, and who waits for it."""


class RolloutManager:
    """Generates trajectories on whatever bundles the scheduler leases to this job at the moment.

    Args:
        cluster: the registered rollout cluster; replica `i` runs on `cluster.bundles[i]`.
        replicas: the replica actors, one per bundle, created but not loaded.
        router: decides who generates what.
        clock: Unix seconds.
        background: runs what may block; default: threads of its own.
        threaded: False leaves it to the caller to handle what was posted, with `handle_posted`.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        replicas: Replicas,
        router: Router,
        client: RolloutClient,
        folder: RunFolder,
        clock: Callable[[], float] = time.time,
        background: Executor | None = None,
        threaded: bool = True,
    ) -> None:
        self._cluster = cluster
        self._router = router
        self._client = client
        self._clock = clock
        self._background = background or ThreadPoolExecutor(_BACKGROUND_THREADS, "rollout-background")
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._posting = threading.Lock()
        self._closed = False
        self._asked: dict[str, Asked] = {}  # what is open, by id
        self._expected: dict[Owner, Demand] = {}
        self._device_time = DeviceTime(clock)
        self._left_gpu_s = 0.0
        self._slots_seen = (0, 0, 0)
        self._reported = 0  # trajectories
        self._reported_at = 0.0
        self._reporting = False
        self._shares: Mapping[str, Share] = {}
        self._pool = ReplicaPool(
            cluster,
            replicas=replicas,
            router=router,
            client=client,
            folder=folder,
            clock=clock,
            post=self._post,
            in_background=self._in_background,
            on_collected=self._collected,
        )
        self._thread = threading.Thread(target=self._loop, name="rollout", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # ---- called by the training loop -------------------------------------------------------------------------

    def publish(self, weights: PublishedWeights) -> None:
        """Make `weights` the ones every replica generates with from now on; resident replicas update in place.

        Requests in flight go on with the new weights: their tokens say which version each of them came from.
        """
        self._post(partial(self._pool.publish, weights))

    def generate(
        self, step: int, trajectories: Sequence[Trajectory], timeout_s: float, stop: threading.Event
    ) -> list[Trajectory]:
        """Finish every trajectory, in the order given.

        Raises:
            WaitTimeoutError: not finished within `timeout_s` seconds in which there were devices.
            RolloutError: replicas keep failing.
            InterruptedError: `stop` was set. Whatever it raises, open trajectories are dropped.
        """
        return self.wait(self.submit(step, trajectories), timeout_s, stop)

    def wait(self, asked: "Sequence[Future[Trajectory]]", timeout_s: float, stop: threading.Event) -> list[Trajectory]:
        """What was submitted; raises what `generate` raises."""
        deadline = self.devices_s + timeout_s
        while (found := futures.wait(asked, timeout=_LOOK_S, return_when=futures.FIRST_EXCEPTION)).not_done:
            error = next((one.exception() for one in found.done if one.exception() is not None), None)
            if error is None and stop.is_set():
                error = InterruptedError("the job was asked to stop")
            elif error is None and self.devices_s > deadline:
                error = WaitTimeoutError(self._describe(timeout_s))
            if isinstance(error, Exception):
                self.abandon(error)
                raise error
        return [one.result() for one in asked]

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]":
        """Start to finish every trajectory. A future raises RolloutError when replicas keep failing, or the reason of
        an `abandon`; one that is cancelled ends its trajectory."""
        asked: list[Asked] = [(trajectory, Future()) for trajectory in trajectories]
        self._post(partial(self._submit, step, asked))
        for trajectory, done in asked:
            done.add_done_callback(partial(self._ended, trajectory.id))
        return [done for _, done in asked]

    @property
    def devices_s(self) -> float:
        """Seconds so far in which there was a device to generate on."""
        return self._device_time.seconds

    def expect(self, demand: Demand, purpose: str = "", adapter: str = "") -> None:
        """All that is open, submitted now or later (it waits for something else); heartbeats tell the larger of this,
        of all owners together, and what is submitted."""
        self._post(partial(self._expected.__setitem__, (adapter, purpose), demand))

    def expect_gpu_s(self, left: float) -> None:
        """The GPU-seconds the job expects to use until its last step, for the next heartbeats."""
        self._post(partial(setattr, self, "_left_gpu_s", left))

    def slot_use(self) -> dict[str, float]:
        """Since this was last asked: metric `slot_use`, the share of decoding slots in use (nothing where none was),
        and `tokens_recomputed`, those read again because their trajectories went on elsewhere."""
        before, self._slots_seen = self._slots_seen, (*self._router.decoded, self._router.recomputed)
        tokens, room, again = (now - then for now, then in zip(self._slots_seen, before, strict=True))
        return {**({"slot_use": tokens / room} if room else {}), "tokens_recomputed": float(again)}

    def share(self, adapter: str) -> Share:
        """Of an adapter, as of the last heartbeat."""
        return self._shares.get(adapter, Share())

    @property
    def late_s(self) -> float:
        """By how much the replicas' decoding took longer than declared, in all; one step more or less."""
        return self._router.late_s

    @property
    def decoding_s(self) -> float:
        """Seconds for which replicas have decoded, all of them together."""
        return self._router.decoding_s

    @property
    def is_open(self) -> bool:
        """Whether trajectories are not finished yet."""
        return self._router.outstanding > 0

    @property
    def held(self) -> Mapping[int, tuple[int, ...]]:
        """The devices of each bundle that has a lease."""
        return self._pool.held

    def abandon(self, reason: Exception, purpose: str | None = "", adapter: str = "") -> None:
        """Drop the open trajectories of an owner (purpose None: of an adapter for whatever purpose) and expect none;
        whoever waits for one is told the reason."""
        self._post(partial(self._abandon, reason, purpose, adapter))

    def close(self) -> None:
        """Stop; the replicas are left as they are. From now on shrinks fail at once, so that nobody waits for them."""
        with self._posting:
            if self._closed:
                return
            self._closed = True
            self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._background.shutdown(wait=False, cancel_futures=True)

    # ---- called by the bundle feed ---------------------------------------------------------------------------

    def grow(self, leases: Sequence[Lease]) -> None:
        """Raises RlixError when the rollout was closed."""
        self._post_or_raise(partial(self._pool.grow, tuple(leases)))

    def request_shrink(self, leases: Sequence[Lease]) -> list["Future[None]"]:
        """Start to give `leases` back; each future completes when the device memory of its lease is released."""
        acks: list[Future[None]] = [Future() for _ in leases]
        self._post_or_raise(partial(self._pool.shrink, tuple(leases), acks))
        return acks

    def lost(self, leases: Sequence[Lease]) -> None:
        """The control plane killed these replicas: what they generated continues elsewhere."""
        self._post(partial(self._pool.lost, tuple(leases)))

    def fail(self, error: RlixError) -> None:
        """Nothing will be generated any more: whoever waits for trajectories is told why."""
        self._post(partial(self._drop_all, error))

    # ---- the loop --------------------------------------------------------------------------------------------

    def handle_posted(self) -> None:
        """Handle everything that was posted so far, on this thread: for `threaded=False`."""
        while not self._inbox.empty():
            if (action := self._inbox.get_nowait()) is not None:
                self._handle(action)

    def _post(self, action: Callable[[], None]) -> bool:
        with self._posting:
            if not self._closed:
                self._inbox.put(action)
            return not self._closed

    def _post_or_raise(self, action: Callable[[], None]) -> None:
        if not self._post(action):
            raise self._closed_error()

    def _closed_error(self) -> RlixError:
        return RlixError(f"the rollout of {self._cluster.name} was closed: the job is ending")

    def _loop(self) -> None:
        while True:
            working = self._outstanding() > 0
            try:
                action = self._inbox.get(timeout=_REPORT_INTERVAL_S if working else None)
            except queue.Empty:
                action = _nothing
            if action is None:
                break
            self._handle(action)
        self._pool.end(self._closed_error())

    def _handle(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._device_time.note(bool(self._pool.held))
            self._dispatch()
            self._report()
        except Exception as error:  # must reach the waiting training loop, whatever it is
            logger.exception("rollout of %s failed", self._cluster.name)
            self._drop_all(error)

    # ---- trajectories ----------------------------------------------------------------------------------------

    def _submit(self, step: int, asked: Sequence[Asked]) -> None:
        error: Exception | None = None
        if self._pool.weights is None:
            error = RolloutError("no weights were published, so the replicas have nothing to load")
        else:
            try:
                self._router.submit([trajectory for trajectory, _ in asked])
            except ValueError as found:
                error = found
        if error is not None:
            for _, done in asked:
                _fail(done, error)
            return
        self._pool.step = step
        self._asked |= {trajectory.id: (trajectory, done) for trajectory, done in asked}

    def _ended(self, id: str, done: "Future[Trajectory]") -> None:
        """Nobody waits for it: called on the thread that cancelled it."""
        if done.cancelled():
            self._post(partial(self._abort, lambda asked: asked[1] is done, InterruptedError("not wanted any more")))

    def _abandon(self, reason: Exception, purpose: str | None, adapter: str) -> None:
        def is_meant(owner: Owner) -> bool:
            return owner[0] == adapter and purpose in (None, owner[1])

        self._expected = {owner: demand for owner, demand in self._expected.items() if not is_meant(owner)}
        self._abort(lambda asked: is_meant(asked[0].owner), reason)

    def _abort(self, is_meant: Callable[[Asked], bool], reason: Exception) -> None:
        dropped = self._drop({id for id, asked in self._asked.items() if is_meant(asked)}, reason)
        for bundle, flying in dropped.items():
            self._pool.abort(bundle, flying)

    def _drop_all(self, reason: Exception) -> None:
        self._expected = {}
        self._drop(set(self._asked), reason)

    def _drop(self, ids: set[str], reason: Exception) -> dict[int, list[str]]:
        """Forget these trajectories; whoever waits for them is told why.

        Returns which of them are still in flight, by replica."""
        for id in ids & self._asked.keys():
            _fail(self._asked.pop(id)[1], reason)
        return self._router.drop(ids)

    def _dispatch(self) -> None:
        now = self._clock()
        for bundle, requests in self._router.dispatch(now):
            self._pool.generate(bundle, requests)
        moved = self._router.recall()
        if self._pool.grown:
            self._pool.grown = False
            moved += self._router.rebalance(now)
        for bundle, ids in moved:
            self._pool.abort(bundle, ids)

    def _collected(self, bundle: int, collected: Collected) -> None:
        if collected.chunks:
            self._pool.succeeded()
        for trajectory in self._router.take(bundle, collected, self._clock()):
            _, done = self._asked.pop(trajectory.id)
            if done.set_running_or_notify_cancel():  # whoever asked may have given up already
                done.set_result(trajectory)
        for ids, reason in collected.refused:  # the requests' fault: another replica would say the same
            self._router.give_up(bundle, ids)
            refusal = RolloutError(f"replica {bundle} of {self._cluster.name} refused a request: {reason}")
            self._drop(set(ids), refusal)

    # ---- reports ---------------------------------------------------------------------------------------------

    def _outstanding(self) -> int:
        """How many trajectories are open or expected: of each owner, whichever is more."""
        return sum(self._to_come().values()) if self._expected else self._router.outstanding

    def _to_come(self) -> dict[Owner, int]:
        here = self._router.open_by_owner()
        expected = {owner: demand.trajectories for owner, demand in self._expected.items()}
        return {owner: max(here[owner], expected.get(owner, 0)) for owner in {*here, *expected}}

    def _demand(self, trajectories: int, now: float) -> Demand:
        demand = replace(self._router.demand(now), left_gpu_s=self._left_gpu_s, load_s=self._pool.load_s or 0.0)
        if not any(expected.trajectories for expected in self._expected.values()):
            return demand
        # When they end depends on more than decoding.
        here = self._router.tokens_by_owner(now)
        wanted = {owner: expected.tokens for owner, expected in self._expected.items()}
        tokens = round(sum(max(here.get(owner, 0.0), wanted.get(owner, 0)) for owner in {*here, *wanted}))
        return replace(demand, trajectories=trajectories, tokens=tokens, work_s=0.0, floor_s=0.0)

    def _report(self) -> None:
        """Tell the scheduler at once when demand begins or ends, and once per interval while there is some."""
        trajectories, now = self._outstanding(), self._clock()
        if self._reporting or not (trajectories or self._reported):
            return
        edge = (trajectories == 0) != (self._reported == 0)
        if edge or now - self._reported_at >= _REPORT_INTERVAL_S:
            self._reporting, self._reported, self._reported_at = True, trajectories, now
            self._shares = shares(self._to_come(), self._router.flying_by_adapter())
            report = partial(self._client.report_demand, self._cluster.name, self._demand(trajectories, now))
            self._in_background(report, self._report_ended)

    def _report_ended(self, answer: "Future[None]") -> None:
        """A report that did not arrive is made again with the next heartbeat: no trajectory suffers from it."""
        self._reporting = False
        error = answer.exception()
        if isinstance(error, PipelineGoneError):
            raise error
        if error is not None:
            logger.warning("demand of %s was not reported: %s", self._cluster.name, error)
            self._reported = -1  # whatever is told next, it is news

    def _in_background(self, work: Callable[[], None], then: Callable[["Future[None]"], None]) -> None:
        future = self._background.submit(work)
        future.add_done_callback(lambda answer: self._post(partial(then, answer)))

    def _describe(self, timeout_s: float) -> str:
        held = self._pool.held
        return (
            f"step {self._pool.step}: {self._outstanding()} trajectories were not finished within "
            f"{timeout_s:g} s with devices; replicas hold {held or 'none'}"
        )


def _fail(done: "Future[Trajectory]", reason: Exception) -> None:
    if done.set_running_or_notify_cancel():  # whoever asked may have given up already
        done.set_exception(reason)


def _nothing() -> None:
    """Handled when only a report is due."""
