"""What Ctrl-C does to a step: whom it waits for, and when it does not."""

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.flow.planner import Mode
from rlix.flow.programs import running as running_module
from rlix.flow.programs.running import Running
from rlix.flow.programs.segment import SegmentRun
from tests.flow.programs.pretended import ITEMS, POOL, Group, flow, profile

pytestmark = pytest.mark.usefixtures("no_ray")


class Interrupted:
    """The end of a stage: who waits for it is interrupted so often."""

    def __init__(self, times: int) -> None:
        self.times = times

    def is_set(self) -> bool:
        return self.times < 0

    def wait(self, timeout: float) -> None:
        self.times -= 1
        if self.times >= 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("with_job", [False, True])
def test_a_second_interrupt_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, with_job: bool
) -> None:
    """With a lease whoever has not answered is ended, for others may have the devices next."""
    ended: list[str] = []
    monkeypatch.setattr(Group, "end_late", lambda group: ended.append(group.name))
    lease: Any = object() if with_job else None
    with Running(flow(), POOL, plan=Mode.COLLOCATED, profile=profile(ones=0.1, tens=0.1, more=0.1)) as running:
        running.groups["ones"].late.append(1)  # type: ignore[attr-defined]
        segment = next(segment for segment in running.plan.segments if "ones" in segment.names)

        def interrupt(times: int) -> list[BaseException]:
            failed: list[BaseException] = []
            run: Any = SimpleNamespace(fail=failed.append)
            ends: Any = [Interrupted(times)]
            running._wait_for(ends, run, segment, lease)
            return failed

        assert interrupt(0) == []
        assert [type(error) for error in interrupt(1)] == [KeyboardInterrupt]
        assert "Ctrl-C: the step ends when sums/ones has answered; a second Ctrl-C" in caplog.text
        assert ended == []
        if with_job:
            interrupt(2)
            assert "sums/ones" in ended
        with pytest.raises(KeyboardInterrupt):
            interrupt(3 if with_job else 2)


def test_an_interrupted_step_waits_for_the_calls_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many stages there are, and whichever is at work."""
    part, waited_for, told = Group.part, threading.Event(), threading.Event()
    ended: list[str] = []

    class End(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited_for.set()
            return super().wait(timeout)

    def interrupts(group: Group, *args: Any) -> Any:
        assert waited_for.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert told.wait(60)
        ended.append(group.name)
        return part(group, *args)

    fail = SegmentRun.fail
    of_threading = SimpleNamespace(Event=End, Thread=threading.Thread, Lock=threading.Lock)
    monkeypatch.setattr(running_module, "threading", of_threading)
    monkeypatch.setattr(Group, "part", interrupts)
    monkeypatch.setattr(SegmentRun, "fail", lambda run, error: (fail(run, error), told.set()))
    with Running(flow(), POOL, plan=Mode.DISAGGREGATED, profile=profile(ones=0.1, tens=0.1, more=0.1)) as running:
        with pytest.raises(KeyboardInterrupt):
            running.step(list(range(ITEMS)))
        assert ended == ["sums/ones"]
