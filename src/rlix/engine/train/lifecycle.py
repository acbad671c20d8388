"""The workers of a training engine: how they start, are called, and are replaced by others."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray.exceptions import ActorDiedError

from rlix.engine import placement
from rlix.engine.base import Engine, plainly
from rlix.engine.life_cycle import Residency, training
from rlix.engine.train.evacuation import Evacuated, evacuate, settled
from rlix.engine.train.executor import TrainExecutor
from rlix.engine.train.layout import Layout
from rlix.engine.train.materialize import ModuleSpec
from rlix.engine.train.worker import TrainWorker
from rlix.flow.workers.group import WorkerGroup
from rlix.protocol.errors import DeviceBusyError, RlixError, StaleEpochError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, Fence, Process

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""After one rank failed: how long the others may take to end the same call before they are held to wait for it."""
SETTLE_TIMEOUT_S = 15.0
"""How long ranks that wait for one that failed may take to come back before they are held to hang."""
HAND_OVER_TIMEOUT_S = 60.0
"""How long ranks that hang may take to tell what they hold before the engine is given up."""
SPARE_GROUPS = 3
"""Places that an engine has left and may come back to: its workers stay there, with nothing on their devices."""
_REBUILD = "build() the engine and load a state"


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
        self._taking_over = False  # workers that are given up if they fail, for the others still have the state
        self._calls = 0  # of these workers
        self._dispatch = threading.Lock()  # calls of two threads reach all ranks in one order
        self._under_way, self._last_ended = 0, time.monotonic()  # calls
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
        self._epoch = lease.epoch if isinstance(lease, Fence) else lease

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
            group.run("setup", how.executor, layout, spec, how.collective_timeout_s, timeout_s=how.build_timeout_s)
        except WorkerError as error:
            raise plainly(error) from error.__cause__

    def _name_holders(self, group: WorkerGroup) -> None:
        if self._started_as.name_holders is not None:
            self._started_as.name_holders(group.processes)

    def _adopt(
        self, group: WorkerGroup, devices: tuple[Device, ...], layout: Layout, lease: Fence | int | None
    ) -> None:
        self._group, self.devices, self._layout = group, devices, layout
        self._calls = 0
        placement.occupy(self, devices)
        self._moved(Residency.DEVICE)
        self._hold(lease)

    def _rebuild(
        self, state: Evacuated, devices: tuple[Device, ...], layout: Layout, lease: Fence | int | None
    ) -> None:
        """Go on with new workers, which take `state`; on failure the engine is what it was."""
        group = self._start(devices, layout, replace(self._started_as.spec, undefined=True), lease)
        before, residency = (self._group, self.devices, self._layout, self._calls, self._lease), self.residency
        self._adopt(group, devices, layout, lease)
        configured, self._configured = self._configured, []
        self._taking_over = True
        try:
            for name, args, kwargs in configured:
                getattr(self, name)(*args, **kwargs)
            self._run("take_over", state.parts, timeout_s=self._timeout_s)
        except BaseException:  # re-raised
            group.close(graceful=False)
            self._group, self.devices, self._layout, self._calls, held = before
            self._moved(residency)
            self._hold(held)
            self._configured = configured
            placement.occupy(self, self.devices)
            raise
        finally:
            self._taking_over = False

    def _replace(
        self, devices: tuple[Device, ...], layout: Layout, lease: Fence | int | None, *, back: bool = False
    ) -> None:
        """Go on with other workers; these are in step. `back`: they stay, for the engine may come back to them."""
        old, before = self._workers(), (self.devices, self._layout)
        with self._dispatch:
            parts = old.call("hand_over", undo=False)
        old.results("hand_over", parts, timeout_s=self._timeout_s)
        self._run("to_host", timeout_s=self._timeout_s)
        self._moved(Residency.HOST)
        try:
            self._rebuild(Evacuated(tuple(parts), agree=True), devices, layout, lease)
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
        super()._end(graceful=graceful)

    # ---- calls -------------------------------------------------------------------------------------------------

    def _run(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        with self._busy():
            return self._ran(method, *args, timeout_s=timeout_s)

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

    def _ran(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        group = self._workers()
        name = f"{args[0]}" if method == "call" else method
        try:
            refs = self._send(group, method, *args)
        except BaseException as error:  # re-raised; an argument cannot be sent, and some ranks may have got theirs
            lost, fix = self._recover(group, name)
            _note(error, lost, fix)
            raise
        try:
            return group.results(name, refs, timeout_s=timeout_s)
        except WorkerError as error:
            lost, fix = self._recover(group, name, dead=isinstance(error.__cause__, ActorDiedError))
            own = plainly(error)
            if lost:
                own.args = (f"{own}; {lost}",)
            _note(own, fix)
            raise own from error.__cause__
        except WaitTimeoutError as error:
            lost, fix = self._recover(group, name, late=True)
            if lost:
                error.args = (f"{error}; {lost}",)
            _note(error, fix)
            raise

    def _send(self, group: WorkerGroup, method: str, *args: Any) -> list[Any]:
        """Call all ranks, as they are numbered."""
        with self._dispatch:
            self._calls += 1
            try:
                return group.call("do", self._calls, method, *args)
            except BaseException:  # re-raised; what some ranks did not get is no call that they missed
                group.call("skip", self._calls)
                raise

    def _recover(self, group: WorkerGroup, method: str, *, dead: bool = False, late: bool = False) -> tuple[str, str]:
        """After a call that did not end well: make sure that the next one meets no collective of this one.

        Returns what is lost, if anything, and what who holds the engine can do then, which is a note of the error: who
        runs a job has other ways. `dead`: a rank has ended; `late`: one has not ended the call in time.
        """
        if self._taking_over:
            return "", ""
        if dead and group is self._group and group.world_size == 1:
            self._end(graceful=False)
            return "its only worker has ended, and its state is lost", _REBUILD
        alone = group.world_size == 1 and not late
        if group is not self._group or alone or settled(group, GRACE_S):
            return "", ""
        logger.warning("%s: not all ranks came back from %s(): starting its workers anew", self.name, method)
        state = evacuate(group, SETTLE_TIMEOUT_S, HAND_OVER_TIMEOUT_S)
        if state is None:
            self._end(graceful=False)
            return (
                "not all ranks came back from it or told what they hold, so the workers were ended: weights and "
                "optimizer state are lost"
            ), _REBUILD
        group.close(graceful=False)
        residency = self.residency
        try:
            self._rebuild(state, self.devices, self._layout, self._lease)
            if residency is Residency.META or not state.agree:
                self.meta()
            elif residency is Residency.HOST:
                self.cpu()
        except RlixError as error:
            self._end(graceful=False)
            return f"new workers could not take its state, which is lost ({error})", _REBUILD
        if not state.agree:
            return (
                "weights had been changed by then, not by all ranks alike or not to the end, so weights and optimizer "
                "state were dropped"
            ), "load_state() or load() brings the engine back"
        return "its workers were started anew with their weights and optimizer state; gradients are dropped", ""


def _note(error: BaseException, *notes: str) -> None:
    for note in filter(None, notes):
        error.add_note(note)
