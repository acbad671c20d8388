"""Following launched jobs to their end: polling, Ctrl-C, lost terminals, live view or lines of log."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.live import Live

from rlix.cli.stalls import Stalls
from rlix.cli.text import clock
from rlix.cli.view import Snapshot, alarms, holdings, job_line, names_of, render, utilisation
from rlix.protocol.messages import ControlStatus

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus

logger = logging.getLogger(__name__)

FINAL_STATES = frozenset({"finished", "failed", "stopped"})  # as in rlix.pipeline.jobs.handle, which is slow to import
POLL_S = 0.5
LOG_EVERY_S = 5.0
STOP_TIMEOUT_S = 90.0
"""How long jobs may take to write a checkpoint and end after Ctrl-C, before they are ended for them."""


STOPS = "each job that has done a step writes a checkpoint and ends"


class Job(Protocol):
    """What is needed of a launched job."""

    @property
    def name(self) -> str: ...

    def status(self) -> "JobStatus": ...

    def stop(self) -> None: ...


class KilledError(Exception):
    """Ctrl-C while nothing runs yet, or a second one: the user does not want to wait for a clean stop."""


@dataclass(slots=True)
class Interrupts:
    """Notes SIGINT and SIGTERM: the first asks for a clean stop, the second raises KilledError where the program is.

    Later ones are ignored: by then everything is being ended, within bounded time. SIGHUP is ignored: who loses the
    terminal goes on without it, and so does what is started meanwhile.
    """

    signal_number: int | None = None
    killed: bool = False
    wake: threading.Event = field(default_factory=threading.Event)
    _at_once: bool = False

    @property
    def stop_wanted(self) -> bool:
        return self.signal_number is not None

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """The signal handler."""
        if not self.stop_wanted:
            self.signal_number = number
            self.wake.set()
            if self._at_once:
                self.kill()
        elif not self.killed:
            self.kill()

    def kill(self) -> None:
        """Raises KilledError: there is nothing to stop cleanly, or no wish to."""
        self.killed = True
        raise KilledError

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Already the first signal raises KilledError inside the block: nothing runs that could stop cleanly."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    @contextlib.contextmanager
    def handled(self) -> Iterator["Interrupts"]:
        """Handle the signals inside the block (in the main thread)."""
        before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
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


class LastingScreen:
    """Another screen for as long as its terminal or pipe is there; from then on what is written to it goes nowhere."""

    def __init__(self, screen: Screen, console: Console) -> None:
        self._screen = screen
        self._file = console.file

    def show(self, snapshot: Snapshot) -> None:
        try:
            self._screen.show(snapshot)
        except OSError as error:
            logger.warning("the output is gone (%s); going on without it", error.strerror)
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._file.fileno())
                os.close(nowhere)


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
        self._said: tuple[str, ...] = ()

    def show(self, snapshot: Snapshot) -> None:
        held, called = holdings(snapshot.control), names_of(snapshot)
        for job in snapshot.jobs:
            state, progress, time = self._printed.get(job.pipeline_id, ("", (-1, ""), float("-inf")))
            due = snapshot.elapsed_s - time >= self._every_s and (job.step, job.phase) != progress
            if state != job.state or due:
                name, devices = called[job.pipeline_id], held.get(job.pipeline_id, ())
                self._line(job_line(job, devices, snapshot.elapsed_s, name))
                self._printed[job.pipeline_id] = (job.state, (job.step, job.phase), snapshot.elapsed_s)
        sentences = (*alarms(snapshot.control), *snapshot.stalls)
        for sentence in sentences:
            if sentence not in self._said:
                self._line(f"{clock(snapshot.elapsed_s)} {sentence}")
        self._said = sentences
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
    now_s: Callable[[], float],
    *,
    only_look: bool = False,
) -> tuple["JobStatus", ...]:
    """Follow the jobs until each has ended; returns how.

    After a first interrupt every job is asked to stop, once, and has STOP_TIMEOUT_S for it; then its last status is
    returned as it is. Raises KilledError at a second interrupt. Who may `only_look` leaves at the first: the last
    statuses are returned, and the jobs go on.
    """
    mean, stalls, start, stop_deadline = MeanUtilisation(), Stalls(), now_s(), float("inf")
    while True:
        statuses = tuple(job.status() for job in jobs)
        control, now = control_status(), now_s()
        elapsed_s = now - start
        stopping = stop_deadline < float("inf")
        notice = f"stopping: {STOPS} (Ctrl-C again to end at once)" if stopping else ""
        stalled = stalls.sentences(control, statuses, elapsed_s)
        screen.show(Snapshot(statuses, control, elapsed_s, mean.add(utilisation(control), now), notice, stalled))
        running = [status for status in statuses if status.state not in FINAL_STATES]
        if not running or (only_look and interrupts.stop_wanted):
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


@contextlib.contextmanager
def screen_on(console: Console, *, live: bool) -> Iterator[Screen]:
    """The live view where the console is a terminal, otherwise lines of log; both survive the loss of it."""
    if live and console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as drawn:
            yield LastingScreen(LiveScreen(drawn), console)
    else:
        yield LastingScreen(LogScreen(console), console)
