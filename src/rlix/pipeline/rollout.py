"""Elastic rollouts: replicas come and go with their leases while `generate` runs; the I/O around `Router`.

All state lives on one thread. Everything else (the training loop, the coordinator's calls, Ray's completions) posts a
callable to its inbox, so no lock is needed and the order of events is the order in which they are handled.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from ray.exceptions import RayActorError

from rlix.engine.requests import GenerationResult
from rlix.engine.weights import PublishedWeights
from rlix.pipeline.router import ReplicaState, Router, Trajectory
from rlix.pipeline.run_folder import RunFolder, Span
from rlix.protocol.errors import RlixError, StaleEpochError, WaitTimeoutError
from rlix.protocol.messages import Cluster, Demand, Lease

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 0.1
_MAX_FAILURES_IN_A_ROW = 3


class RolloutError(RlixError):
    """The rollout cannot go on; the message says which replica failed and how."""


class Replicas(Protocol):
    """What rollouts need of a group of replica actors; `WorkerGroup` fits."""

    def call(self, method: str, *args: Any, ranks: Sequence[int]) -> list[Any]: ...

    def restart(self, rank: int) -> None: ...

    @property
    def handles(self) -> tuple[Any, ...]: ...


class RolloutClient(Protocol):
    """What rollouts need of the control plane; `JobClient` fits."""

    def report_demand(self, cluster: str, trajectories: int, tokens: int = 0) -> None: ...

    def release(self, lease: Lease) -> None: ...

    def attach_workers(self, cluster: str, workers: Mapping[int, Any]) -> None: ...


class RolloutManager:
    """Generates trajectories on whatever bundles the scheduler leases to this job at the moment.

    Args:
        cluster: the registered rollout cluster; replica `i` runs on `cluster.bundles[i]`.
        replicas: the replica actors, one per bundle, created but not loaded.
        router: decides who generates what.
        shrink_deadline_s: how long a release of device memory may take before it is reported as an error.
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
    ) -> None:
        self._cluster = cluster
        self._replicas = replicas
        self._router = router
        self._client = client
        self._folder = folder
        self._clock = clock
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._leases: dict[int, Lease] = {}
        self._acks: dict[int, Future[None]] = {}
        self._revoked: dict[int, int] = {}  # bundle -> the newest epoch that was taken back
        self._dead: set[int] = set()
        self._restarting: set[int] = set()
        self._weights: PublishedWeights | None = None
        self._finished: list[Trajectory] = []
        self._done: Future[list[Trajectory]] | None = None
        self._failures = 0
        self._reported = Demand(0)
        self._reported_at = 0.0
        self._step = 0
        client.attach_workers(cluster.name, dict(enumerate(replicas.handles)))
        self._thread = threading.Thread(target=self._loop, name="rollout", daemon=True)
        self._thread.start()

    # ---- called by the training loop -------------------------------------------------------------------------

    def publish(self, weights: PublishedWeights) -> None:
        """Make `weights` the ones every replica generates with from now on; resident replicas update in place."""
        self._post(partial(self._publish, weights))

    def generate(
        self, step: int, trajectories: Sequence[Trajectory], timeout_s: float, stop: threading.Event
    ) -> list[Trajectory]:
        """Finish every trajectory, in the order given.

        Raises:
            WaitTimeoutError: not finished within `timeout_s`.
            RolloutError: replicas keep failing.
            InterruptedError: `stop` was set; open trajectories are dropped.
        """
        done: Future[list[Trajectory]] = Future()
        self._post(partial(self._start, step, list(trajectories), done))
        deadline = self._clock() + timeout_s
        while True:
            try:
                finished = {t.id: t for t in done.result(timeout=0.2)}
                return [finished[t.id] for t in trajectories]
            except TimeoutError:
                if stop.is_set():
                    self._post(self._abandon)
                    raise InterruptedError("the job was asked to stop") from None
                if self._clock() > deadline:
                    self._post(self._abandon)
                    raise WaitTimeoutError(self._describe(timeout_s)) from None

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=10)

    # ---- called by the coordinator ---------------------------------------------------------------------------

    def grow(self, leases: Sequence[Lease]) -> None:
        self._post(partial(self._grow, tuple(leases)))

    def shrink(self, leases: Sequence[Lease], deadline_s: float) -> None:
        """Return once the bundles' device memory is released: the return is the acknowledgement."""
        acks: list[Future[None]] = [Future() for _ in leases]
        self._post(partial(self._shrink, tuple(leases), acks))
        end = self._clock() + deadline_s
        for lease, ack in zip(leases, acks, strict=True):
            try:
                ack.result(timeout=max(0.0, end - self._clock()))
            except TimeoutError:
                raise WaitTimeoutError(
                    f"replica {lease.bundle} of {self._cluster.name} on devices {lease.devices} did not release its "
                    f"memory within {deadline_s:g} s"
                ) from None

    def lost(self, leases: Sequence[Lease]) -> None:
        """The control plane killed these replicas: what they generated continues elsewhere."""
        self._post(partial(self._lost, tuple(leases)))

    # ---- on the manager's thread -----------------------------------------------------------------------------

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)

    def _loop(self) -> None:
        while (action := self._inbox.get()) is not None:
            try:
                action()
                self._dispatch()
                self._report()
            except Exception as error:  # must reach the waiting training loop, whatever it is
                logger.exception("rollout of %s failed", self._cluster.name)
                self._fail(error)

    def _start(self, step: int, trajectories: list[Trajectory], done: "Future[list[Trajectory]]") -> None:
        self._current_weights()
        self._step, self._finished, self._done, self._failures = step, [], done, 0
        self._router.submit(trajectories)
        self._finish_if_done()

    def _abandon(self) -> None:
        self._router.drop_all()
        self._done = None
        for bundle in self._router.bundles(ReplicaState.READY, ReplicaState.DRAINING):
            self._replicas.call("abort", None, ranks=[bundle])

    def _fail(self, error: Exception) -> None:
        self._router.drop_all()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self._done = None

    def _publish(self, weights: PublishedWeights) -> None:
        self._weights = weights
        for bundle in self._router.bundles(ReplicaState.READY):
            self._router.loading(bundle)
            self._update(bundle)

    def _grow(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            bundle = _bundle(lease)
            if lease.epoch <= self._revoked.get(bundle, 0):
                continue  # calls of the control plane may overtake each other: this lease has ended already
            self._leases[bundle] = lease
            self._router.loading(bundle)
            if bundle not in self._dead:
                self._load(bundle)
            elif bundle not in self._restarting:
                self._restart(bundle)

    def _load(self, bundle: int) -> None:
        weights = self._current_weights()
        self._call(bundle, "load", partial(self._loaded, weights.version), "load", weights, self._leases[bundle].epoch)

    def _update(self, bundle: int) -> None:
        weights = self._current_weights()
        self._call(bundle, "sync", partial(self._loaded, weights.version), "update", weights)

    def _loaded(self, version: int, bundle: int, _: Any) -> None:
        self._failures = 0
        if self._router.state(bundle) is ReplicaState.DRAINING:
            self._offload(bundle)
        elif version != self._current_weights().version:
            self._update(bundle)  # a newer version was published while this one loaded
        else:
            self._router.ready(bundle)

    def _current_weights(self) -> PublishedWeights:
        if self._weights is None:
            raise RolloutError("no weights were published, so the replicas have nothing to load")
        return self._weights

    def _shrink(self, leases: tuple[Lease, ...], acks: list["Future[None]"]) -> None:
        for lease, ack in zip(leases, acks, strict=True):
            bundle = _bundle(lease)
            self._revoked[bundle] = lease.epoch
            held = self._leases.get(bundle)
            if held is None or held.epoch != lease.epoch:
                ack.set_result(None)  # released or lost before the request arrived, or not even grown
                continue
            self._acks[bundle] = ack
            if bundle in self._dead:
                self._forget(bundle)  # its actor is still being restarted and holds nothing
            else:
                self._drain(bundle)

    def _drain(self, bundle: int) -> None:
        """Towards `_offloaded`. A loading replica gets there once it has loaded, a generating one once it stopped."""
        loading = self._router.state(bundle) is ReplicaState.LOADING
        self._router.draining(bundle)
        if self._router.in_flight(bundle):
            self._replicas.call("abort", None, ranks=[bundle])
        elif not loading:
            self._offload(bundle)

    def _offload(self, bundle: int) -> None:
        self._call(bundle, "offload", self._offloaded, "offload", self._leases[bundle].epoch)

    def _offloaded(self, bundle: int, _: Any) -> None:
        self._forget(bundle)

    def _forget(self, bundle: int) -> None:
        self._router.off(bundle)
        self._leases.pop(bundle, None)
        ack = self._acks.pop(bundle, None)
        if ack is not None:
            ack.set_result(None)

    def _lost(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            bundle = _bundle(lease)
            if self._leases.get(bundle) == lease:
                logger.warning("replica %d of %s was killed by the control plane", bundle, self._cluster.name)
                self._dead.add(bundle)
                self._forget(bundle)

    def _restart(self, bundle: int) -> None:
        self._restarting.add(bundle)

        def restart() -> None:
            try:
                self._replicas.restart(bundle)
            except (RlixError, RayActorError) as error:
                self._post(partial(self._restart_failed, bundle, error))
            else:
                self._post(partial(self._restarted, bundle))

        threading.Thread(target=restart, name=f"restart-replica-{bundle}", daemon=True).start()

    def _restart_failed(self, bundle: int, error: Exception) -> None:
        self._restarting.discard(bundle)
        if bundle in self._leases:
            self._replica_failed(bundle, error)

    def _restarted(self, bundle: int) -> None:
        self._restarting.discard(bundle)
        self._dead.discard(bundle)
        self._client.attach_workers(self._cluster.name, {bundle: self._replicas.handles[bundle]})
        if bundle in self._leases:  # not lost while it restarted
            self._load(bundle)

    def _dispatch(self) -> None:
        for bundle, requests in self._router.dispatch():
            self._call(bundle, "busy", self._generated, "generate", requests)

    def _generated(self, bundle: int, results: list[GenerationResult]) -> None:
        self._finished += self._router.complete(bundle, results)
        if self._router.state(bundle) is ReplicaState.DRAINING and not self._router.in_flight(bundle):
            self._offload(bundle)
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._done is not None and self._router.demand().trajectories == 0:
            done, self._done = self._done, None
            self._report()
            done.set_result(self._finished)

    def _call(self, bundle: int, kind: str, then: Callable[[int, Any], None], method: str, *args: Any) -> None:
        """Call one replica; its answer (or failure) comes back through the inbox, its span into the run folder."""
        start, epoch = self._clock(), self._leases[bundle].epoch
        (ref,) = self._replicas.call(method, *args, ranks=[bundle])

        def handle(future: "Future[Any]") -> None:
            self._span(bundle, kind, start)
            if bundle not in self._leases or self._leases[bundle].epoch != epoch:
                return  # the replica was lost meanwhile; whoever lost it has dealt with its trajectories
            error = future.exception()
            if error is None:
                then(bundle, future.result())
            else:
                self._replica_failed(bundle, error)

        ref.future().add_done_callback(lambda future: self._post(partial(handle, future)))

    def _replica_failed(self, bundle: int, error: BaseException) -> None:
        logger.warning("replica %d of %s failed: %s", bundle, self._cluster.name, error)
        lease = self._leases[bundle]
        self._dead.add(bundle)
        self._forget(bundle)
        with contextlib.suppress(StaleEpochError):  # the control plane may have taken it back at the same moment
            self._client.release(lease)
        self._failures += 1
        if self._failures >= _MAX_FAILURES_IN_A_ROW:
            raise RolloutError(
                f"{self._failures} replica failures in a row, the last of them in replica {bundle} of "
                f"{self._cluster.name}: {error}"
            ) from error

    def _report(self) -> None:
        demand, now = self._router.demand(), self._clock()
        if demand == self._reported:
            return
        edge = (demand.trajectories == 0) != (self._reported.trajectories == 0)
        if edge or now - self._reported_at >= _REPORT_INTERVAL_S:
            self._client.report_demand(self._cluster.name, demand.trajectories, demand.tokens)
            self._reported, self._reported_at = demand, now

    def _span(self, bundle: int, kind: str, start: float) -> None:
        devices = self._cluster.bundles[bundle]
        self._folder.spans([Span(devices, self._cluster.name, "rollout", kind, start, self._clock(), self._step)])

    def _describe(self, timeout_s: float) -> str:
        held = {bundle: lease.devices for bundle, lease in self._leases.items()}
        return (
            f"step {self._step}: {self._router.demand().trajectories} trajectories were not finished within "
            f"{timeout_s:g} s; replicas hold {held or 'no devices'}"
        )


def _bundle(lease: Lease) -> int:
    if lease.bundle is None:
        raise ValueError(f"lease {lease.epoch} of {lease.cluster} is a gang, not a rollout bundle")
    return lease.bundle
