"""The workers of a training engine: how they start, are called, and are replaced by others."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray.exceptions import RayActorError

from rlix.engine import placement
from rlix.engine.base import Engine, plainly
from rlix.engine.life_cycle import Residency, training
from rlix.engine.time_limits import loading_s
from rlix.engine.train.arguments import for_ranks
from rlix.engine.train.evacuation import dead, evacuate, settled
from rlix.engine.train.executor import TrainExecutor
from rlix.engine.train.layout import Layout
from rlix.engine.train.materialize import ModuleSpec
from rlix.engine.train.worker import TrainWorker
from rlix.protocol.errors import DeviceBusyError, RlixError, StaleEpochError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, Fence, Process
from rlix.workers.futures import futures_of
from rlix.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""After one rank failed: how long the others may take to end the same call before they are held to wait for it."""
SETTLE_TIMEOUT_S = 15.0
"""How long ranks that wait for one that failed may take to come back before they are held to hang."""
HAND_OVER_TIMEOUT_S = 60.0
"""How long ranks that hang may take to tell what they hold before the engine is given up; longer, the more it is."""
_STATE_BYTES = 12  # for each parameter: in float32, with AdamW's moments
SPARE_GROUPS = 3
"""Places that an engine has left and may come back to: its workers stay there, with nothing on their devices."""
_REBUILD = "build() the engine and load a state"
_REFILL = "load_state() or load() brings the engine back"


@dataclass(frozen=True, slots=True)
class StartedAs:
    """How workers are started; the same whenever an engine is built anew."""

    executor: type[TrainExecutor]
    spec: ModuleSpec
    namespace: str | None
    start: Literal["fork", "spawn"]
    build_timeout_s: float
    collective_timeout_s: float
    name_holders: Callable[[Mapping[int, Process]], object] | None


@dataclass(slots=True, eq=False)
class _Call:
    """Of all ranks, of whose outcome its caller does not know yet. Without a number it was not sent.

    `left`: its answers, where its caller waits for them no more (Ctrl-C): it is under way until all are there.
    """

    group: WorkerGroup
    number: int = 0
    refs: Sequence[Any] = ()
    left: Sequence[Future[Any]] = ()

    @property
    def is_over(self) -> bool:
        return bool(self.left) and all(answer.done() for answer in self.left)


class TrainWorkers(Engine):
    """The part of a `TrainEngine` that knows its workers."""

    _started_as: StartedAs

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._layout = Layout()
        self._lease: Fence | int | None = None
        self._epoch: int | None = None
        self._ended = 0  # the newest epoch that was released
        self._spares: dict[tuple[Device, ...], tuple[WorkerGroup, Layout]] = {}  # who was left first comes first
        self._publisher: WorkerGroup | None = None  # who has what was published last
        self._built = 0  # how often workers were started
        self._part_bytes = 0  # about, of a training state, on each rank
        self._replacing = threading.RLock()  # held while others take the workers' place: calls wait for these
        self._calls = 0  # of these workers
        self._open: list[_Call] = []  # the first one first
        self._dispatch = threading.Lock()  # calls of two threads reach all ranks in one order
        self._under_way, self._last_ended = 0, time.monotonic()  # calls
        self._outcome: tuple[WorkerGroup, tuple[str, str]] | None = None  # of the last recovery, for all its calls
        self._configured: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]] = []

    @property
    def leased(self) -> bool:
        return self._lease is not None

    @property
    def idle_s(self) -> float:
        """For how many seconds no call has been under way."""
        return 0.0 if self._under_way else time.monotonic() - self._last_ended

    def _hold(self, lease: Fence | int | None) -> None:
        self._lease = lease
        self._epoch = _epoch(lease)

    def _moved(self, where: Residency) -> None:
        """Note where the bytes are now; they are one part, and define themselves."""
        self._known = True
        resident = training(resident=where is not Residency.META)
        self._life = resident.released(keep_host=True) if where is Residency.HOST else resident

    def _start(
        self, devices: tuple[Device, ...], layout: Layout, spec: ModuleSpec, lease: Fence | int | None
    ) -> WorkerGroup:
        """Workers on these devices that have built their module; none are left where one failed."""
        if (group := self._come_back(devices, layout, spec, lease)) is not None:
            return group
        how = self._started_as
        self._built += 1
        group = WorkerGroup(
            TrainWorker,
            name=self.name if self._built == 1 else f"{self.name}.{self._built}",
            placements=[(device,) for device in devices],
            namespace=how.namespace,
            start=how.start,
            max_concurrency=1,
            start_timeout_s=how.build_timeout_s,
        )
        try:
            self._set_up(group, layout, spec, lease)
        except BaseException:  # re-raised; whatever it is, Ctrl-C too, no worker is left behind
            group.close(graceful=False)
            raise
        return group

    def _come_back(
        self, devices: tuple[Device, ...], layout: Layout, spec: ModuleSpec, lease: Fence | int | None
    ) -> WorkerGroup | None:
        """The workers that it has left on these devices, set up anew; None where there are none that can be.

        Those that are refused a device wait on there: replicas may still need what they have published.
        """
        group, spread = self._spares.pop(devices, (None, layout))
        if group is None:
            return None
        if spread != layout:
            group.close()
            return None
        try:
            self._set_up(group, layout, spec, lease)
        except (StaleEpochError, DeviceBusyError):
            self._keep_out(group, devices, layout)
            raise
        except (WorkerError, WaitTimeoutError) as error:
            logger.warning("%s: the workers that it comes back to are replaced: %s", self.name, error)
            group.close(graceful=False)
            return None
        except BaseException:  # re-raised, as in `_start`
            group.close(graceful=False)
            raise
        return group

    def _keep_out(self, group: WorkerGroup, devices: tuple[Device, ...], layout: Layout) -> None:
        """Another rank was refused its device."""
        try:
            group.run("leave", timeout_s=self._timeout_s)
            self._spares[devices] = group, layout
        except (WorkerError, WaitTimeoutError) as error:
            logger.warning("%s: workers that were refused a device are ended: %s", self.name, error)
            group.close(graceful=False)

    def _set_up(self, group: WorkerGroup, layout: Layout, spec: ModuleSpec, lease: Fence | int | None) -> None:
        how = self._started_as
        try:
            self._name_holders(group)
            group.run("enter", lease, self._ended, timeout_s=how.build_timeout_s)
            arguments = (how.executor, layout, spec, how.collective_timeout_s)
            of_ranks = group.run("setup", *arguments, timeout_s=how.build_timeout_s)
            self._part_bytes = of_ranks[0].parameters * _STATE_BYTES // layout.copy
        except WorkerError as error:
            raise plainly(error) from error.__cause__

    def _name_holders(self, group: WorkerGroup) -> None:
        if self._started_as.name_holders is not None:
            self._started_as.name_holders(group.processes)

    def _adopt(
        self, group: WorkerGroup, devices: tuple[Device, ...], layout: Layout, lease: Fence | int | None, calls: int = 0
    ) -> None:
        """From now on these are its workers, which are filled and have been called so often."""
        with self._replacing:  # a thread that recovers others ends what is there if it cannot
            self._group, self.devices, self._layout = group, devices, layout
            with self._dispatch:
                self._calls, self._open = calls, []
            placement.occupy(self, devices)
            self._moved(Residency.DEVICE)
            self._hold(lease)

    def _rebuild(
        self,
        before: WorkerGroup,
        parts: tuple[Any, ...],
        devices: tuple[Device, ...],
        layout: Layout,
        lease: Fence | int | None,
    ) -> None:
        """Go on with new workers in place of those of `before`; nobody else can call them before they have their state.

        `parts`: what the ranks of `before` handed over; nothing where they had no bytes.
        """
        self._check_goes_on(before)
        timeout_s = self._timeout_s
        group = self._start(devices, layout, replace(self._started_as.spec, undefined=True), lease)
        epoch, calls = _epoch(lease), 0
        try:
            for name, args, kwargs in self._configured:
                given, calls = for_ranks(layout, args, kwargs), calls + 1
                called = group.call("do", calls, calls, "call", name, given.args, given.kwargs, epoch, True)
                group.results(name, called, timeout_s=timeout_s)
            if parts:
                calls += 1
                group.results("take_over", group.call("do", calls, calls, "take_over", parts), timeout_s=timeout_s)
            self._check_goes_on(before)
        except BaseException as error:  # re-raised
            group.close(graceful=False)
            if isinstance(error, WorkerError):
                raise plainly(error) from error.__cause__
            raise
        self._adopt(group, devices, layout, lease, calls)

    def _check_goes_on(self, group: WorkerGroup) -> None:
        if self._group is not group:
            raise RlixError(f"{self.name} was closed meanwhile")

    def _replace(
        self, devices: tuple[Device, ...], layout: Layout, lease: Fence | int | None, *, back: bool = False
    ) -> None:
        """Go on with other workers; these are in step. `back`: they stay, for the engine may come back to them."""
        with self._replacing:
            self._replace_now(devices, layout, lease, back=back)

    def _replace_now(
        self, devices: tuple[Device, ...], layout: Layout, lease: Fence | int | None, *, back: bool
    ) -> None:
        old, before = self._workers(), (self.devices, self._layout)
        parts = old.call("hand_over")
        old.results("hand_over", parts, timeout_s=self._timeout_s)
        self._run("to_host", timeout_s=self._timeout_s)
        self._moved(Residency.HOST)
        try:
            self._rebuild(old, tuple(parts), devices, layout, lease)
        except BaseException:  # re-raised; these go on
            self._name_holders(old)
            raise
        if back:
            self._leave(old, *before)
        else:
            old.close()
            self._close_spares()

    def _leave(self, group: WorkerGroup, devices: tuple[Device, ...], layout: Layout) -> None:
        """Its workers keep nothing but what they have published. Too many of them are too much memory."""
        try:
            group.run("park", timeout_s=self._timeout_s)
        except (WorkerError, WaitTimeoutError) as error:
            logger.warning("%s: the workers that it leaves are ended: %s", self.name, error)
            group.close(graceful=False)
            return
        self._spares[devices] = group, layout
        unneeded = [there for there, (spare, _) in self._spares.items() if spare is not self._publisher]
        for there in unneeded[: max(0, len(self._spares) - SPARE_GROUPS)]:
            self._settle_saves()
            self._spares.pop(there)[0].close()

    def _close_spares(self) -> None:
        while self._spares:
            self._spares.popitem()[1][0].close()

    def _settle_saves(self) -> None:
        """Wait until what is being written in the background is: workers that end take it with them."""

    def _end(self, *, graceful: bool) -> None:
        self._hold(None)
        self._close_spares()
        self._publisher, self._configured = None, []
        super()._end(graceful=graceful)

    # ---- calls -------------------------------------------------------------------------------------------------

    def _run(self, method: str, *args: Any, timeout_s: float, split_for: Layout | None = None) -> list[Any]:
        """What each rank answers. `split_for`: how the ranks were laid out when `args` were divided among them."""
        with self._busy():
            return self._ran(method, *args, timeout_s=timeout_s, split_for=split_for)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """What the block waits for ends by itself."""
        with self._dispatch:
            self._under_way += 1
        try:
            yield
        finally:
            with self._dispatch:
                self._last_ended = time.monotonic()  # first: `idle_s` may be asked for between the two
                self._under_way -= 1

    def _ran(self, method: str, *args: Any, timeout_s: float, split_for: Layout | None = None) -> list[Any]:
        call = _Call(self._workers())
        name = f"{args[0]}" if method == "call" else method
        try:
            try:
                self._send(call, method, *args, split_for=split_for)
            except BaseException as error:  # re-raised; an argument cannot be sent, and some ranks may have got theirs
                if call.number:
                    _note(error, *self._recover(call.group, name))
                raise
            return self._answered(call, name, timeout_s)
        except KeyboardInterrupt:
            call.left = futures_of(call.refs)
            raise
        finally:
            with self._dispatch:
                self._open = [other for other in self._open if other is not call or call.left]

    def _answered(self, call: _Call, name: str, timeout_s: float) -> list[Any]:
        try:
            return call.group.results(name, call.refs, timeout_s=timeout_s)
        except WorkerError as error:
            lost, fix = self._recover(call.group, name, gone=isinstance(error.__cause__, RayActorError))
            own = plainly(error)
            if lost:
                own.args = (f"{own}; {lost}",)
            _note(own, fix)
            raise own from error.__cause__
        except WaitTimeoutError as error:
            lost, fix = self._recover(call.group, name, late=True)
            if lost:
                error.args = (f"{error}; {lost}",)
            _note(error, fix)
            raise

    def _send(self, call: _Call, method: str, *args: Any, split_for: Layout | None) -> None:
        """Call all ranks, as they are numbered; those that others take the place of, once these have the state."""
        with self._replacing, self._dispatch:
            call.group = group = self._workers()
            if split_for not in (None, self._layout):
                raise RlixError(
                    f"{self.name} got ranks laid out otherwise while a call's arguments were divided among those it "
                    "had; no rank was called: call it again"
                )
            self._calls += 1
            call.number = self._calls
            self._open = [*(other for other in self._open if not other.is_over), call]
            try:
                call.refs = group.call("do", call.number, self._open[0].number, method, *args)
            except BaseException:  # re-raised; what some ranks did not get is no call that they missed
                group.call("skip", call.number)
                raise

    def _recover(self, group: WorkerGroup, method: str, *, gone: bool = False, late: bool = False) -> tuple[str, str]:
        """After a call that did not end well: make sure that the next one meets no collective of this one.

        Returns what is lost, if anything, and what who holds the engine can do then, which is a note of the error: who
        runs a job has other ways. `gone`: a rank has ended, or cannot be reached; `late`: one has not ended the call in
        time.
        """
        with self._replacing:  # two threads may have found the same workers failed
            if self._outcome is not None and self._outcome[0] is group:
                return self._outcome[1]
            found = self._recovered(group, method, gone=gone, late=late)
            if group is not self._group:
                self._outcome = group, found
            return found

    def _recovered(self, group: WorkerGroup, method: str, *, gone: bool, late: bool) -> tuple[str, str]:
        if gone and group is self._group and group.world_size == 1 and dead(group, SETTLE_TIMEOUT_S):
            return self._give_up("its only worker has ended, and its state is lost")
        alone = group.world_size == 1 and not late
        if group is not self._group or alone or settled(group, GRACE_S):
            return "", ""
        logger.warning("%s: not all ranks came back from %s(): starting its workers anew", self.name, method)
        devices, layout, lease = self.devices, self._layout, self._lease
        residency = self._life.residency  # as far as is known: who would be asked is being ended
        since = self._open[0].number if self._open else self._calls  # other threads do not know the outcome of theirs
        copies = layout.world > layout.copy
        hand_over_s = loading_s(self._part_bytes, HAND_OVER_TIMEOUT_S)
        state = evacuate(group, SETTLE_TIMEOUT_S, hand_over_s, since=since, copies=copies)
        if state is None:
            return self._give_up(
                "not all ranks came back from it or told what they hold, so the workers were ended: weights and "
                "optimizer state are lost"
            )
        try:
            group.close(graceful=False)
            self._rebuild(group, () if residency is Residency.META else state.parts, devices, layout, lease)
            if residency is Residency.META or not state.agree:
                self.meta()
            elif residency is Residency.HOST:
                self.cpu()
        except BaseException as error:  # Ctrl-C too: the old workers have ended
            said = str(error) or type(error).__name__
            given_up = self._give_up(f"new workers could not take its state, which is lost ({said})")
            if isinstance(error, RlixError):
                return given_up
            raise
        if residency is Residency.META:
            return "its workers were started anew, with nothing on them, as before", _REFILL
        if not state.agree:
            return (
                "weights had been changed by then, not by all ranks alike or not to the end, so weights and optimizer "
                "state were dropped"
            ), _REFILL
        said = "its workers were started anew with their weights and optimizer state; gradients are dropped"
        if state.lost:
            ranks = ", ".join(map(str, state.lost))
            said += f" (what rank {ranks} held, which was killed, is of a copy; its random stream begins anew)"
        return said, ""

    def _give_up(self, lost: str) -> tuple[str, str]:
        """End all workers; `life` says why until it is built again."""
        self._end(graceful=False)
        self._life = replace(self._life, failure=f"{lost}; {_REBUILD}")
        return lost, _REBUILD


def _epoch(lease: Fence | int | None) -> int | None:
    return lease.epoch if isinstance(lease, Fence) else lease


def _note(error: BaseException, *notes: str) -> None:
    for note in filter(None, notes):
        error.add_note(note)
