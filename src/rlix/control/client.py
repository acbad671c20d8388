"""What a job uses to ask for devices: a synchronous face of the scheduler service, for any process."""

import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import ray

from rlix.control.gang_queue import Asked
from rlix.control.heartbeat import Heartbeat
from rlix.control.rollout_lease import RolloutLease, check_wait, is_time
from rlix.control.rpc import Patient
from rlix.node.process import this_process
from rlix.protocol.errors import PipelineGoneError, RlixError, SpecError, StaleEpochError, WaitTimeoutError
from rlix.protocol.messages import (
    LARGEST_COUNT,
    MOST_METRICS,
    MOST_SECONDS,
    Demand,
    Device,
    Fence,
    Lease,
    LeaseRecord,
    LeaseStatus,
    Process,
    Progress,
    Registration,
    RolloutAnswer,
)
from rlix.protocol.types import NAMESPACE, SCHEDULER_ACTOR_NAME, Phase

logger = logging.getLogger(__name__)

_LONGEST_METRIC = 200  # characters of its name
_STOP_POLL_S = 0.5  # how soon somebody who waits in the queue notices that he should stop


class JobClient:
    """The leases of one pipeline. Works in any process of the Ray cluster; a request ends with its process.

    Calls wait while the control plane is away, and go on with the one that comes back. Thread-safe.
    """

    def __init__(
        self, pipeline_id: str, *, answer_timeout_s: float = 30.0, poll_s: float = 5.0, patience_s: float = 60.0
    ) -> None:
        """`answer_timeout_s` bounds every call, besides what a call is asked to wait. While it waits for devices, the
        client asks again every `poll_s` seconds. `patience_s`: how long the control plane may be away.

        Raises:
            RlixError: there is no control plane here.
        """
        self.pipeline_id = pipeline_id
        self.process = this_process(ray.get_runtime_context().get_node_id(), f"{pipeline_id}'s program")
        self._timeout_s = answer_timeout_s
        self._poll_s = poll_s
        self._scheduler = Patient(_find_scheduler, "the scheduler", patience_s=patience_s)
        self._of_thread = threading.local()
        self._pool: str | None = None
        self._name = pipeline_id
        self._left = False
        self._warned: set[str] = set()
        self.heartbeat = Heartbeat(lambda held: self._ask("beat", self.process, held), pipeline_id)

    # -- gangs -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(
        self,
        cluster: str,
        phase: Phase,
        timeout_s: float | None = None,
        *,
        longest_s: float | None = None,
        stop: threading.Event | None = None,
        devices: Sequence[int] = (),
        home: Sequence[int] = (),
        move_s: float = 0.0,
    ) -> Iterator[Lease]:
        """Holds the cluster's devices for the duration of the block; it is asked for as by `acquire`.

        Raises what `acquire` raises, and StaleEpochError at its end when the lease was taken back meanwhile.
        """
        lease = self.acquire(
            cluster, phase, timeout_s, longest_s=longest_s, stop=stop, devices=devices, home=home, move_s=move_s
        )
        mine = self._held_here()
        mine.append(lease.epoch)
        try:
            yield lease
        except BaseException:  # raised again
            # The lease may be gone, because the pipeline was ended; what the block raised says more than that.
            with contextlib.suppress(StaleEpochError):
                self.release(lease)
            raise
        else:
            self.release(lease)
        finally:
            mine.remove(lease.epoch)

    def acquire(
        self,
        cluster: str,
        phase: Phase,
        timeout_s: float | None = None,
        *,
        longest_s: float | None = None,
        stop: threading.Event | None = None,
        devices: Sequence[int] = (),
        giving: Sequence[Lease] = (),
        home: Sequence[int] = (),
        move_s: float = 0.0,
    ) -> Lease:
        """Waits until the cluster's devices are this pipeline's; the caller must `release` them.

        Args:
            timeout_s: longest wait; by default as long as it takes.
            longest_s: after so many seconds with the devices the lease is taken back and its workers are ended.
            stop: ends the wait when it is set.
            devices: exactly these of the cluster's, in place of any that it may have.
            giving: leases that are given back first, as `release` does. It is one question: who waits for their devices
                already goes first by the rules of the queue, and rollouts do not get them for a moment in between.
            home: of a cluster that may run elsewhere, too: the devices where its state lies. It waits for these, unless
                it costs less to run on others.
            move_s: what its state takes to others; it is part of that cost.

        Raises:
            SpecError: the request makes no sense.
            PipelineGoneError: the pipeline is not admitted, or ended meanwhile.
            WaitTimeoutError: not granted within `timeout_s` seconds; says who holds the devices.
            DeadlockError: it waits for what this job itself keeps.
            StaleEpochError: a lease to be given back is not held any more; nothing was asked for or given back.
            InterruptedError: `stop` was set.
        """
        if not isinstance(phase, Phase):
            raise SpecError(
                f"{cluster}: the phase must be one of rlix.Phase, as Phase.ACTOR_TRAINING, got {phase!r:.80}"
            )
        if timeout_s is not None and (not is_time(timeout_s, MOST_SECONDS) or timeout_s == 0):
            raise SpecError(
                f"{cluster}: timeout_s must be seconds above 0, at most {MOST_SECONDS:g}, or None to wait on, "
                f"got {timeout_s!r:.80}"
            )
        key = uuid.uuid4().hex
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        holding = tuple(self._held_here())
        given = tuple(lease.epoch for lease in giving)
        try:
            while True:
                _go_on(stop, f"{cluster} ({phase.name})")
                # A wait that is over is still answered: with who holds the devices.
                left_s = None if deadline is None else max(0.001, round(deadline - time.monotonic(), 3))
                wait_s = self._poll_s if stop is None else min(self._poll_s, _STOP_POLL_S)
                asked = Asked(key, self.process, holding, left_s, longest_s, tuple(devices), given, tuple(home), move_s)
                lease: Lease | None = self._ask("poll_gang", cluster, phase, asked, wait_s, wait_s=wait_s)
                for epoch in given:
                    self.heartbeat.gave_back(epoch)
                given = ()  # they are back: if the request is dropped meanwhile, it may be asked for anew
                if lease is not None:
                    self.heartbeat.holds(lease.epoch)
                    return lease
        except (WaitTimeoutError, InterruptedError, KeyboardInterrupt) as error:
            with contextlib.suppress(RlixError):
                self._ask("withdraw_gang", key)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"stopped by Ctrl-C while waiting for {cluster} ({phase.name})") from None
            raise

    def release(self, *leases: Lease) -> None:
        """Gives leases back, once their devices' memory is released. Who still locks one a little later is ended.

        Raises:
            StaleEpochError: one is not held any more; the others were given back.
        """
        epochs = [lease.epoch for lease in leases]
        for epoch in epochs:
            self.heartbeat.gave_back(epoch)
        if self._left:  # nobody need be asked: an interpreter that ends runs what is after a `yield`, too
            raise StaleEpochError(f"leases {epochs} ended with {self._name}")
        self._ask("release", epochs)

    def give_back(self, lease: Lease, devices: Sequence[int]) -> Lease:
        """Gives some devices of a gang back before the phase ends, once their memory is released; returns what is left.

        Answers when they are free. Who still locks one of them a little later is ended, with the whole lease.

        Raises:
            SpecError: they are not devices of the lease, or all of them, or it is a rollout's.
            StaleEpochError: the lease is not held any more.
        """
        check_part(lease, devices)
        left: Lease = self._ask("give_back", lease.epoch, tuple(devices))
        return left

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def rollout(self, cluster: str, demand: Demand | int = 0) -> RolloutLease:
        """The bundles of an elastic cluster, which come and go; see `RolloutLease`. A context manager."""
        lease = RolloutLease(self, cluster)
        self.report_demand(cluster, demand)
        return lease

    def poll_rollout(
        self, cluster: str, held: tuple[int, ...], draining: tuple[int, ...], wait_s: float
    ) -> RolloutAnswer:
        """What is new about the cluster's bundles for who knows of these epochs; what `RolloutLease` is made of.

        Raises:
            SpecError: `wait_s` is longer than an hour, or no time.
        """
        check_wait(cluster, wait_s)
        answer: RolloutAnswer = self._ask("poll_rollout", cluster, self.process, held, draining, wait_s, wait_s=wait_s)
        return answer

    def report_demand(self, cluster: str, demand: Demand | int) -> None:
        """What the rollout still has to do, at least how many trajectories: the scheduler grants bundles by it."""
        known = demand if isinstance(demand, Demand) else Demand(demand)
        self._ask("report_demand", cluster, known)

    def report_progress(self, step: int, steps: int = 0, metrics: Mapping[str, object] | None = None) -> None:
        """How far it is: `step` steps are done, of `steps` where that is known, and what was measured in the last one.

        People see it. Of the metrics finite numbers with printable names are told, at most `MOST_METRICS` of them. What
        cannot be shown is said once, in a warning, and left out: it is no reason to end.
        """
        done, of = _count(step), _count(steps)
        if done is None:
            self._warn_once("step", "its metrics are not shown: step must be a whole number")
            return
        numbers = {
            name: number
            for key, x in (metrics or {}).items()
            if (number := _number(x)) is not None
            and 0 < len(name := str(key)) <= _LONGEST_METRIC
            and name.isprintable()
        }
        left_out = [*(str(key) for key in metrics or {} if str(key) not in numbers), *(["steps"] if of is None else [])]
        if left_out:
            text = "is not shown: it needs a finite number, and a printable name of at most"
            self._warn_once("metrics", f"{left_out[0]!a:.80} {text} {_LONGEST_METRIC} characters")
        told = dict(list(numbers.items())[:MOST_METRICS])
        self._ask("report_progress", Progress(done, of or 0, told))

    def _warn_once(self, of: str, text: str) -> None:
        if of not in self._warned:
            self._warned.add(of)
            logger.warning("%s: %s", self.pipeline_id, text)

    # -- the pipeline ------------------------------------------------------------------------------------------------

    def join(self, name: str = "") -> None:
        """Says that this process is the pipeline's program: the pipeline ends when it dies."""
        self._ask("name_holders", "", {0: Process(self.process.node_id, self.process.pid, self.process.started, name)})

    def name_holders(self, cluster: str, processes: Mapping[int, Process]) -> None:
        """Names the processes that keep bytes under the cluster's leases, by rank (of a rollout, by bundle).

        So they are shown, and ended when they do not give a device back.
        """
        self._ask("name_holders", cluster, dict(processes))

    def fence(self, lease: Lease) -> Fence:
        """What the device lock is told of a lease: whose it is, and which."""
        if self._pool is None:
            self._pool = str(self._call("pool_id"))
            self._name = self.registration().name or self.pipeline_id
        return Fence(self._pool, lease.epoch, self._name, lease.phase.name.lower())

    def leases(self) -> tuple[LeaseStatus, ...]:
        """The leases this pipeline holds now, in order of grant."""
        leases: tuple[LeaseStatus, ...] = self._ask("leases")
        return leases

    def registration(self) -> Registration:
        """What this pipeline registered.

        Raises:
            PipelineGoneError: it is not registered.
        """
        registration: Registration = self._ask("registration")
        return registration

    def devices(self) -> dict[int, Device]:
        """The pool's devices by id."""
        devices: tuple[Device, ...] = self._call("devices")
        return {device.id: device for device in devices}

    def lease_log(self, since: int = 0) -> tuple[LeaseRecord, ...]:
        """What happened to this pipeline's leases after record number `since`."""
        records: tuple[LeaseRecord, ...] = self._ask("lease_log", since)
        return records

    def unregister(self, reason: str = "") -> None:
        """Ends the pipeline and all its processes but this one; fine when it has ended already."""
        self.heartbeat.stop()
        self._left = True
        with contextlib.suppress(PipelineGoneError):
            self._ask("unregister_pipeline", reason, self.process)

    def _held_here(self) -> list[int]:
        """The epochs of the `phase` blocks that this thread is in."""
        if not hasattr(self._of_thread, "held"):
            self._of_thread.held = []
        held: list[int] = self._of_thread.held
        return held

    def _ask(self, method: str, *args: object, wait_s: float = 0.0) -> Any:
        return self._call(method, self.pipeline_id, *args, wait_s=wait_s)

    def _call(self, method: str, *args: object, wait_s: float = 0.0) -> Any:
        if self.process.pid != os.getpid():
            raise RlixError(
                f"a JobClient of process {self.process.pid} was used in process {os.getpid()}: make another"
            )
        return self._scheduler.ask(method, *args, timeout_s=self._timeout_s + wait_s)


def _number(value: object) -> float | None:
    """As a finite number, also one of NumPy's; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - too large, many in one, or whatever a user's own type raises
        return None
    return number if math.isfinite(number) else None


def _count(value: object) -> int | None:
    number = _number(value)
    return None if number is None or number > LARGEST_COUNT else max(0, int(number))


def check_part(lease: Lease, devices: Sequence[int]) -> None:
    """Raises SpecError unless these are a part of a gang's devices."""
    if lease.phase is Phase.ROLLOUT:
        raise SpecError(f"lease {lease.epoch} is a rollout's of {lease.cluster}: give its bundle back as a whole")
    kept = [device for device in lease.devices if device not in devices]
    if not devices or not kept or len(kept) + len(devices) != len(lease.devices):
        of = f"of devices {list(lease.devices)}, which {lease.cluster} holds"
        raise SpecError(f"{of}, a part may be given back before the phase ends, not {list(devices)}")


def _go_on(stop: threading.Event | None, what: str) -> None:
    if stop is not None and stop.is_set():
        raise InterruptedError(f"told to stop while waiting for {what}")


def _find_scheduler() -> Any:
    try:
        return ray.get_actor(SCHEDULER_ACTOR_NAME, NAMESPACE)
    except ValueError:
        raise RlixError("no control plane in this Ray cluster; call rlix.init first") from None
