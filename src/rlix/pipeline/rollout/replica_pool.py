"""The replicas of a rollout and the leases they are resident under: loading, updating, draining, failing, replacing.

Every method runs on the rollout manager's thread, and so does everything passed as `then`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rlix.engine.inference.requests import Collected, GenerationRequest
from rlix.engine.weights.publication import PublishedWeights
from rlix.node.run_folder import RunFolder, Span
from rlix.pipeline.rollout.rebalance import running_mean
from rlix.pipeline.rollout.router import ReplicaState, Router
from rlix.protocol.errors import RlixError, StaleEpochError
from rlix.protocol.messages import Cluster, Demand, Fence, Lease, LeaseStatus, Process

logger = logging.getLogger(__name__)

_FAILURES_PER_REPLICA = 3
_COLLECT_S = 2.0  # longest a replica is listened to at a time
_BUSY_SPAN_S = 1.0  # of a replica that stays busy

Then = Callable[["Future[Any]"], None]


class RolloutError(RlixError):
    """The rollout cannot go on; the message says which replica failed and how."""


class Replicas(Protocol):
    """What rollouts need of a group of replica actors; `WorkerGroup` fits."""

    def call(self, method: str, *args: Any, ranks: Sequence[int]) -> list[Any]: ...

    def kill(self, rank: int) -> None: ...

    def restart(self, rank: int) -> None: ...

    @property
    def processes(self) -> Mapping[int, Process]: ...


class RolloutClient(Protocol):
    """What rollouts need of the control plane; `BundleFeed` is the real one."""

    def report_demand(self, cluster: str, demand: Demand) -> None: ...

    def release(self, lease: Lease) -> None: ...

    def name_holders(self, cluster: str, processes: Mapping[int, Process]) -> None: ...

    def fence(self, lease: Lease) -> Fence: ...

    def leases(self) -> tuple[LeaseStatus, ...]: ...


@dataclass(slots=True)
class _Bundle:
    """One replica, as its leases see it."""

    lease: Lease | None = None
    ended: int = 0  # the newest epoch that was taken back; the control plane's calls may overtake each other
    acks: list["Future[None]"] = field(default_factory=list)  # of the shrinks that wait for `lease` to end
    moving: bool = False  # a load, update or offload has not returned
    version: int | None = None  # of the weights on the device; None: nothing is there
    replace: bool = False  # the actor is dead: nothing can be loaded before another one took its place
    background: bool = False  # it is being killed or replaced
    collecting: bool = False  # a `collect` has not returned
    busy_since: float | None = None  # that no span tells of


class ReplicaPool:
    """One replica per bundle of `cluster`; see `RolloutManager` for the arguments.

    Args:
        post: run a callable on the manager's thread, later.
        in_background: run the first callable where it may block, then the second, with its future, on the manager's
            thread.
        on_collected: what a replica reports of its trajectories.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        replicas: Replicas,
        router: Router,
        client: RolloutClient,
        folder: RunFolder,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], object],
        in_background: Callable[[Callable[[], None], Then], None],
        on_collected: Callable[[int, Collected], None],
    ) -> None:
        self._cluster = cluster
        self._replicas = replicas
        self._router = router
        self._client = client
        self._folder = folder
        self._clock = clock
        self._post = post
        self._in_background = in_background
        self._on_collected = on_collected
        self._bundles = [_Bundle() for _ in cluster.bundles]
        self._failures = 0
        self.weights: PublishedWeights | None = None
        self.grown = False  # a replica became ready since the caller last cleared this
        self.step = 0  # that spans belong to
        self.load_s: float | None = None  # what a load took lately
        client.name_holders(cluster.name, replicas.processes)

    # ---- the manager's requests ------------------------------------------------------------------------------

    def publish(self, weights: PublishedWeights) -> None:
        before, self.weights = self.weights, weights
        for bundle in self._router.bundles(ReplicaState.READY):
            self._router.loading(bundle, keeps_cache=before is not None and before.publication == weights.publication)
        for bundle in self._router.bundles(ReplicaState.LOADING):
            self.advance(bundle)

    def grow(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            number, bundle = self._find(lease)
            if lease.epoch <= bundle.ended:
                continue  # it has ended already, and that was heard first
            if bundle.lease is not None:
                if lease.epoch <= bundle.lease.epoch:
                    continue
                bundle.replace = True  # a lease only ends without this job's doing when its worker is killed
                self._end_lease(number)
            bundle.lease = lease
            self._router.loading(number)
            self.advance(number)

    def shrink(self, leases: tuple[Lease, ...], acks: list["Future[None]"]) -> None:
        for lease, ack in zip(leases, acks, strict=True):
            number, bundle = self._find(lease)
            bundle.ended = max(bundle.ended, lease.epoch)
            if bundle.lease is None or bundle.lease.epoch != lease.epoch:
                ack.set_result(None)  # released or lost before the request arrived, or not even grown
                continue
            bundle.acks.append(ack)
            if self._router.state(number) in (ReplicaState.LOADING, ReplicaState.READY):
                self._router.draining(number)
                if self._router.in_flight(number):
                    self.abort(number)
            self.advance(number)

    def lost(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            number, bundle = self._find(lease)
            if bundle.lease is not None and bundle.lease.epoch != lease.epoch:
                continue  # a later grant was heard first, and with it that this one had ended
            if bundle.lease is None and lease.epoch < bundle.ended:
                continue
            logger.warning("replica %d of %s was killed by the control plane", number, self._cluster.name)
            bundle.ended = max(bundle.ended, lease.epoch)
            bundle.replace = True
            self._end_lease(number)

    def abort(self, number: int, ids: list[str] | None = None) -> None:
        """End these requests of a replica (None: all); their call returns early with the tokens they have."""
        self._replicas.call("abort", ids, ranks=[number])

    def generate(self, number: int, requests: Sequence[GenerationRequest]) -> None:
        """Have a ready replica begin with these; what comes of them is handed to `on_collected`."""
        bundle = self._bundles[number]
        if bundle.busy_since is None:
            bundle.busy_since = self._clock()
        self.call(number, None, self._started, "start", requests)
        if not bundle.collecting:
            self._collect(number)

    def succeeded(self) -> None:
        """A replica generated: failures before it were not in a row."""
        self._failures = 0

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """The devices of each bundle that has a lease."""
        return {number: b.lease.devices for number, b in enumerate(self._bundles) if b.lease is not None}

    def end(self, error: RlixError) -> None:
        """Nobody handles anything any more: fail the shrinks that wait."""
        for bundle in self._bundles:
            acks, bundle.acks = bundle.acks, []
            for ack in acks:
                ack.set_exception(error)

    # ---- one replica -----------------------------------------------------------------------------------------

    def advance(self, number: int) -> None:
        """Take the bundle's next step towards what its state asks for, unless one is being taken."""
        bundle, state = self._bundles[number], self._router.state(number)
        if bundle.lease is None or bundle.moving:
            return
        fence, weights = self._client.fence(bundle.lease), self.weights
        if state is ReplicaState.DRAINING:
            if bundle.replace or bundle.version is None:
                self._end_lease(number)  # nothing is on the device
            elif not self._router.in_flight(number):
                self._start_move(number, "offload", None, "offload", fence)
        elif state is ReplicaState.LOADING and weights is not None and not bundle.background:
            if bundle.replace:
                self._replace(number)
            elif bundle.version == weights.version:
                self._router.ready(number)
                self.grown = True
            elif bundle.version is None:
                self._start_move(number, "load", weights.version, "load", weights, fence)
            else:
                self._start_move(number, "sync", weights.version, "update", weights)

    def _start_move(self, number: int, kind: str, version: int | None, method: str, *args: Any) -> None:
        self._bundles[number].moving = True
        self.call(number, kind, partial(self._moved, version), method, *args)

    def _moved(self, version: int | None, number: int, answer: "Future[Any]") -> None:
        bundle = self._bundles[number]
        bundle.moving = False
        if (error := answer.exception()) is not None:
            self.failed(number, error)
            return
        bundle.version = version
        if version is None:
            self._end_lease(number)
        else:
            self.advance(number)

    def _started(self, number: int, answer: "Future[Any]") -> None:
        if (error := answer.exception()) is not None:
            self.failed(number, error)

    def _collect(self, number: int) -> None:
        self._bundles[number].collecting = True
        self.call(number, None, self._collected, "collect", _COLLECT_S)

    def _collected(self, number: int, answer: "Future[Any]") -> None:
        bundle = self._bundles[number]
        bundle.collecting = False
        if (error := answer.exception()) is not None:
            self.failed(number, error)
            return
        try:
            self._on_collected(number, answer.result())
        finally:
            if self._router.in_flight(number):
                self._collect(number)
            self._note_busy(number)
            self.advance(number)

    def _note_busy(self, number: int) -> None:
        """One span for as long as the replica had something to do, told piece by piece."""
        bundle, now = self._bundles[number], self._clock()
        if bundle.busy_since is None:
            return
        busy = self._router.in_flight(number) > 0
        if not busy or now - bundle.busy_since >= _BUSY_SPAN_S:
            self._span(number, "busy", bundle.busy_since)
            bundle.busy_since = now if busy else None

    def _end_lease(self, number: int) -> None:
        """The device is free: say so to whoever waits for it."""
        bundle = self._bundles[number]
        self._router.off(number)
        self._note_busy(number)
        bundle.collecting = False
        bundle.lease, bundle.moving, bundle.version = None, False, None
        acks, bundle.acks = bundle.acks, []
        for ack in acks:
            ack.set_result(None)

    def call(
        self, number: int, kind: str | None, then: Callable[[int, "Future[Any]"], None], method: str, *args: Any
    ) -> None:
        """Call one replica; its answer (or failure) comes back through the inbox, a span into the run folder."""
        start, lease = self._clock(), self._bundles[number].lease
        (ref,) = self._replicas.call(method, *args, ranks=[number])

        def handle(answer: "Future[Any]") -> None:
            if kind is not None:
                self._span(number, kind, start)
            if kind == "load" and answer.exception() is None:
                self.load_s = running_mean(self.load_s, self._clock() - start)
            # Else the lease ended meanwhile; whoever ended it has dealt with its trajectories.
            if lease is not None and self._bundles[number].lease == lease:
                then(number, answer)

        ref.future().add_done_callback(lambda answer: self._post(partial(handle, answer)))

    # ---- failures --------------------------------------------------------------------------------------------

    def failed(self, number: int, error: BaseException) -> None:
        bundle = self._bundles[number]
        if not bundle.replace:  # else it is one of several calls that failed together
            self._lose(number, error)

    def _lose(self, number: int, error: BaseException) -> None:
        bundle = self._bundles[number]
        logger.warning("replica %d of %s failed: %s", number, self._cluster.name, error)
        self._router.dead(number)
        bundle.replace, bundle.moving = True, False
        self._give_back(number)
        self._failures += 1
        if self._failures >= _FAILURES_PER_REPLICA * len(self._bundles):
            raise RolloutError(
                f"{self._failures} replica failures in a row, the last of them in replica {number} of "
                f"{self._cluster.name}: {error}"
            ) from error

    def _give_back(self, number: int) -> None:
        """Kill a failed replica, which frees its memory whatever state it is in, then end its lease."""
        bundle = self._bundles[number]
        lease = bundle.lease
        bundle.background = True

        def killed(answer: "Future[None]") -> None:
            bundle.background = False
            if lease is None or bundle.lease != lease:
                self.advance(number)
            elif (error := answer.exception()) is not None:
                # Its memory may still be in use, so the lease stays until the control plane takes it away.
                logger.error("replica %d of %s: %s", number, self._cluster.name, error)
            else:
                bundle.ended = max(bundle.ended, lease.epoch)
                asked = bool(bundle.acks)
                self._end_lease(number)
                if not asked:
                    self._in_background(partial(self._release, lease), _raise_failure)

        self._in_background(partial(self._replicas.kill, number), killed)

    def _release(self, lease: Lease) -> None:
        try:
            self._client.release(lease)
        except StaleEpochError:  # the control plane has taken it back at the same moment
            logger.info("lease %d of %s had ended already", lease.epoch, self._cluster.name)

    def _replace(self, number: int) -> None:
        bundle = self._bundles[number]
        bundle.background = True

        def replace() -> None:
            self._replicas.restart(number)
            self._client.name_holders(self._cluster.name, {number: self._replicas.processes[number]})

        def replaced(answer: "Future[None]") -> None:
            bundle.background = False
            error = answer.exception()
            bundle.replace = error is not None
            if error is None:
                self._confirm(number)
            elif bundle.lease is not None:
                self._lose(number, error)

        self._in_background(replace, replaced)

    def _confirm(self, number: int) -> None:
        """Ask whether the lease still holds: when it was taken by force, that killed the old worker, not the new one.

        From when it is named the new one is killed as well, so a lease that holds now fences off whatever follows.
        """
        bundle = self._bundles[number]
        lease = bundle.lease
        if lease is None:
            return
        bundle.background = True
        held: set[int] = set()

        def confirmed(answer: "Future[None]") -> None:
            bundle.background = False
            if bundle.lease != lease:
                self._confirm(number)
            elif (error := answer.exception()) is not None:
                self._lose(number, error)
            elif lease.epoch in held:
                self.advance(number)
            else:
                bundle.ended = max(bundle.ended, lease.epoch)
                self._end_lease(number)

        self._in_background(lambda: held.update(s.lease.epoch for s in self._client.leases()), confirmed)

    def _span(self, number: int, kind: str, start: float) -> None:
        devices = self._cluster.bundles[number]
        self._folder.spans([Span(devices, self._cluster.name, "rollout", kind, start, self._clock(), self.step)])

    def _find(self, lease: Lease) -> tuple[int, _Bundle]:
        if lease.bundle is None:
            raise ValueError(f"lease {lease.epoch} of {lease.cluster} is a gang, not a rollout bundle")
        return lease.bundle, self._bundles[lease.bundle]


def _raise_failure(answer: "Future[None]") -> None:
    answer.result()
