"""What Ctrl-C does to a step: whom it waits for, and when it does not."""

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.flow.planner import Mode
from rlix.flow.programs import running as running_module
from rlix.flow.programs.interrupts import until_ended
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
    groups: Any = [Group(part, 2, 0, f"sums/{part.name}") for part in flow().parts]
    groups[0].late.append(1)

    def interrupt(times: int) -> list[BaseException]:
        failed: list[BaseException] = []
        run: Any = SimpleNamespace(fail=failed.append)
        ends: Any = [Interrupted(times)]
        until_ended(ends, run, groups, held=with_job)
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


def test_an_interrupt_while_another_is_acted_on_is_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave the stages at work otherwise, and give their devices to others."""
    ended: list[str] = []
    monkeypatch.setattr(Group, "end_late", lambda group: ended.append(group.name))
    groups: Any = [Group(part, 1, 0, part.name) for part in flow().parts]

    def fail(error: BaseException) -> None:
        failed.append(error)
        if len(failed) == 1:
            raise KeyboardInterrupt

    failed: list[BaseException] = []
    run: Any = SimpleNamespace(fail=fail)
    ends: Any = [Interrupted(1)]
    until_ended(ends, run, groups, held=True)
    assert (len(failed), ended) == (2, ["ones", "tens", "more"])


def test_an_interrupted_step_waits_for_the_calls_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many stages there are, and whichever is at work."""
    part, waited_for, told = Group.part, threading.Event(), threading.Event()
    ended: list[str] = []

    class End(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited_for.set()
            return super().wait(timeout)

    def interrupts(group: Group, *args: Any) -> Any:
        assert waited_for.wait(300)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert told.wait(300)
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


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_stage_that_cannot_begin_stops_those_that_have(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Or they would go on without a lease, beside whoever has the devices next."""
    failed: list[BaseException] = []
    fail, begun = SegmentRun.fail, list[str]()

    class Thread(threading.Thread):
        def start(self) -> None:
            if begun:
                raise error
            begun.append(self.name)

    of_threading = SimpleNamespace(Event=threading.Event, Thread=Thread, Lock=threading.Lock)
    with Running(flow(), POOL, plan=Mode.DISAGGREGATED, profile=profile(ones=0.1, tens=0.1, more=0.1)) as running:
        monkeypatch.setattr(running_module, "threading", of_threading)
        monkeypatch.setattr(SegmentRun, "fail", lambda run, error: (fail(run, error), failed.append(error)))
        with pytest.raises(type(error)):
            running.step(list(range(ITEMS)))
    assert failed == [error]
