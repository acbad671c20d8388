import os
import signal
import subprocess
import sys
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from rlix.cli import watch as watch_module
from rlix.cli.view import Snapshot
from rlix.cli.watch import STOP_TIMEOUT_S, Interrupts, KilledError, LastingScreen, LogScreen, MeanUtilisation, watch
from tests.cli.fakes import FakeJob, control, job_status, lease


class Recorder:
    """A screen that keeps what it was shown and may act on it."""

    def __init__(self, act: Callable[[Snapshot], None] = lambda snapshot: None) -> None:
        self.shown: list[Snapshot] = []
        self._act = act

    def show(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)
        self._act(snapshot)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "POLL_S", 0.0)


def ticking(step: float = 1.0) -> Callable[[], float]:
    now = [0.0]

    def clock() -> float:
        now[0] += step
        return now[0]

    return clock


def test_follows_every_job_to_its_end() -> None:
    jobs = [
        FakeJob("a", [job_status("a"), job_status("a", state="finished")]),
        FakeJob("b", [job_status("b"), job_status("b"), job_status("b", state="failed", error="x")]),
    ]
    screen = Recorder()
    statuses = watch(jobs, lambda: control(lease(1, "ft_1", (0, 1))), screen, Interrupts(), ticking())
    assert [status.state for status in statuses] == ["finished", "failed"]
    assert len(screen.shown) == 3
    assert screen.shown[-1].mean_utilisation == pytest.approx(0.5)
    assert not any(job.stop_calls for job in jobs)


def test_one_interrupt_stops_each_job_once_and_waits_for_it() -> None:
    interrupts = Interrupts()
    jobs = [FakeJob("a", [job_status("a")], stops_after=2), FakeJob("b", [job_status("b")], stops_after=4)]
    screen = Recorder(lambda snapshot: interrupts.note(signal.SIGINT) if not interrupts.stop_wanted else None)
    statuses = watch(jobs, control, screen, interrupts, ticking())
    assert [status.state for status in statuses] == ["stopped", "stopped"]
    assert [job.stop_calls for job in jobs] == [1, 1]
    assert "stopping" in screen.shown[-1].notice


def test_a_job_that_does_not_stop_is_given_up_after_the_deadline() -> None:
    interrupts = Interrupts(signal_number=signal.SIGINT)
    job = FakeJob("a", [job_status("a")], stops_after=None)
    screen = Recorder()
    statuses = watch([job], control, screen, interrupts, ticking(STOP_TIMEOUT_S / 4))
    assert statuses[0].state == "running"
    assert len(screen.shown) <= 7


def test_a_second_interrupt_ends_at_once_and_later_ones_are_ignored() -> None:
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    with interrupts.handled():
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.stop_wanted
        with pytest.raises(KilledError):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.signal_number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


def test_who_only_looks_leaves_at_the_first_interrupt_and_stops_nothing() -> None:
    interrupts, job = Interrupts(), FakeJob("a", [job_status("a")])
    screen = Recorder(lambda snapshot: interrupts.note(signal.SIGINT) if not interrupts.stop_wanted else None)
    statuses = watch([job], control, screen, interrupts, ticking(), only_look=True)
    assert [status.state for status in statuses] == ["running"]
    assert job.stop_calls == 0


def test_an_interrupt_before_anything_runs_ends_at_once() -> None:
    interrupts = Interrupts()
    with interrupts.handled(), pytest.raises(KilledError), interrupts.at_once():
        os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.killed


def test_a_hangup_is_ignored_and_so_it_is_by_what_is_started_meanwhile() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with Interrupts().handled() as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        child = subprocess.run([sys.executable, "-c", "import signal; print(signal.getsignal(1).name)"],
                               capture_output=True, text=True, check=True)  # fmt: skip
    assert not interrupts.stop_wanted
    assert child.stdout == "SIG_IGN\n"
    assert signal.getsignal(signal.SIGHUP) is before


def test_the_view_goes_on_when_its_terminal_is_gone() -> None:
    here, there = os.openpty()
    with os.fdopen(there, "w") as terminal:
        console = Console(file=terminal, width=80)
        screen = LastingScreen(LogScreen(console), console)
        os.close(here)
        for step in range(3):
            screen.show(Snapshot((job_status(state=f"state {step}"),), control(), float(step), 0.0))
        terminal.write("still open")


def test_a_stall_is_said_once() -> None:
    out = StringIO()
    screen = LogScreen(Console(file=out, width=200))
    for elapsed, stalls in ((31.0, ("a waits",)), (32.0, ("a waits", "b waits")), (33.0, ())):
        screen.show(Snapshot((), control(), elapsed, 0.0, stalls=stalls))
    assert out.getvalue().splitlines() == ["0:00:31 a waits", "0:00:32 b waits"]


def test_mean_utilisation_weighs_by_time() -> None:
    mean = MeanUtilisation()
    assert mean.add(1.0, 10.0) == 1.0  # nothing but the present is known yet
    assert mean.add(0.5, 12.0) == pytest.approx(0.5)
    assert mean.add(1.0, 13.0) == pytest.approx((0.5 * 2 + 1.0 * 1) / 3)


def test_log_lines_on_change_of_state_and_every_few_seconds() -> None:
    out = StringIO()
    screen = LogScreen(Console(file=out, width=200), every_s=5.0)
    shown = [
        (0.0, job_status(step=0, state="starting", phase="starting")),
        (1.0, job_status(step=0)),  # the state changed
        (2.0, job_status(step=1)),  # too early
        (6.5, job_status(step=4)),
        (12.0, job_status(step=4)),  # no progress: nothing to say
        (12.5, job_status(step=5, state="finished", phase="finished")),
    ]
    for elapsed, status in shown:
        screen.show(Snapshot((status,), control(), elapsed, 0.0))
    screen.show(Snapshot((shown[-1][1],), control(), 13.0, 0.0, notice="stopping"))
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0].split(" ", 1)[1] for line in lines[:-1]] == [
        "sort: starting", "sort: running", "sort: running", "sort: finished",
    ]  # fmt: skip
    assert "step 4/10" in lines[2]
    assert lines[-1] == "stopping"
