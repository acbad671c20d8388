"""Following launched jobs to their end: polling, Ctrl-C, live view or lines of log."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.live import Live

from rlix.cli.view import Snapshot, holdings, job_line, render, utilisation
from rlix.protocol.messages import ControlStatus

if TYPE_CHECKING:
    from rlix.pipeline.base import JobStatus

logger = logging.getLogger(__name__)

FINAL_STATES = frozenset({"finished", "failed", "stopped"})
POLL_S = 0.5
LOG_EVERY_S = 5.0
STOP_TIMEOUT_S = 90.0
"""How long jobs may take to write a checkpoint and end after Ctrl-C, before they are ended for them."""


class Job(Protocol):
    """What is needed of a launched job."""

    @property
    def name(self) -> str: ...

    def status(self) -> "JobStatus": ...

    def stop(self) -> None: ...


class KilledError(Exception):
    """A second Ctrl-C: the user does not want to wait for a clean stop."""


@dataclass(slots=True)
class Interrupts:
    """Notes SIGINT and SIGTERM: the first asks for a clean stop, the second raises KilledError where the program is.

    Later ones are ignored: by then everything is being ended, within bounded time.
    """

    signal_number: int | None = None
    killed: bool = False
    wake: threading.Event = field(default_factory=threading.Event)

    @property
    def stop_wanted(self) -> bool:
        return self.signal_number is not None

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """The signal handler."""
        if not self.stop_wanted:
            self.signal_number = number
            self.wake.set()
        elif not self.killed:
            self.killed = True
            raise KilledError

    @contextmanager
    def handled(self) -> Iterator["Interrupts"]:
        """Handle both signals inside the block (in the main thread)."""
        before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True)
class MeanUtilisation:
    """The time-weighted mean of a share that is looked at now and then."""

    _seconds: float = 0.0
    _weighted: float = 0.0
    _last_time: float | None = None

    def add(self, share: float, now: float) -> float:
        """Count `share` for the time since the last look; returns the mean so far."""
        if self._last_time is not None:
            self._seconds += now - self._last_time
            self._weighted += share * (now - self._last_time)
        self._last_time = now
        return self._weighted / self._seconds if self._seconds > 0 else share


class Screen(Protocol):
    """Where snapshots go."""

    def show(self, snapshot: Snapshot) -> None: ...


class LiveScreen:
    """Redraws the view in place; `live` is a started `rich.live.Live`."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(render(snapshot), refresh=True)


class LogScreen:
    """Prints a line per job when its state changes, and every few seconds when it got on."""

    def __init__(self, console: Console, every_s: float = LOG_EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
        self._printed: dict[str, tuple[str, tuple[int, str], float]] = {}
        self._notice = ""

    def show(self, snapshot: Snapshot) -> None:
        held = holdings(snapshot.control)
        for job in snapshot.jobs:
            state, progress, time = self._printed.get(job.name, ("", (-1, ""), float("-inf")))
            due = snapshot.elapsed_s - time >= self._every_s and (job.step, job.phase) != progress
            if state != job.state or due:
                self._line(job_line(job, held.get(job.pipeline_id, ()), snapshot.elapsed_s))
                self._printed[job.name] = (job.state, (job.step, job.phase), snapshot.elapsed_s)
        if snapshot.notice != self._notice:
            self._notice = snapshot.notice
            self._line(snapshot.notice)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def watch(
    jobs: Sequence[Job],
    control_status: Callable[[], ControlStatus],
    screen: Screen,
    interrupts: Interrupts,
    clock: Callable[[], float],
) -> tuple["JobStatus", ...]:
    """Follow the jobs until each has ended; returns how.

    After a first interrupt every job is asked to stop, once, and has STOP_TIMEOUT_S for it; then its last status is
    returned as it is. Raises KilledError at a second interrupt.
    """
    mean, start, stop_deadline = MeanUtilisation(), clock(), float("inf")
    while True:
        statuses = tuple(job.status() for job in jobs)
        control, now = control_status(), clock()
        stopping = stop_deadline < float("inf")
        notice = "stopping: each job writes a checkpoint and ends (Ctrl-C again to end at once)" if stopping else ""
        screen.show(Snapshot(statuses, control, now - start, mean.add(utilisation(control), now), notice))
        running = [status for status in statuses if status.state not in FINAL_STATES]
        if not running:
            return statuses
        if interrupts.stop_wanted and not stopping:
            stop_deadline = now + STOP_TIMEOUT_S
            interrupts.wake.clear()
            for job in jobs:
                job.stop()
            continue
        if now >= stop_deadline:
            names = ", ".join(f"{status.name} ({status.phase})" for status in running)
            logger.warning("no clean stop within %.0f s of: %s; ending them", STOP_TIMEOUT_S, names)
            return statuses
        interrupts.wake.wait(POLL_S)
