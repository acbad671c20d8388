"""When a part that shares asks for a gang, and what becomes of it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlix.flow.programs import patience
from rlix.flow.programs.patience import ENOUGH, PATIENCE_S, Patience, patient
from rlix.protocol.errors import PipelineGoneError, WaitTimeoutError
from rlix.protocol.messages import Lease
from rlix.protocol.types import Phase
from tests.waiting import until

NOTHING: frozenset[int] = frozenset()
LEASE = Lease(7, "job_1", "flow", Phase.VALUE_COMPUTE, (0, 1))


def test_patience_is_over_when_hardly_anything_was_done_for_a_while() -> None:
    enough = ENOUGH * PATIENCE_S
    waiting = Patience()
    assert not waiting.is_over(0.0, True, 5.0, NOTHING)
    assert not waiting.is_over(PATIENCE_S - 1, True, 5.0, NOTHING)
    assert not waiting.is_over(PATIENCE_S, True, 5.0 + enough, NOTHING)  # it had its share: from here on anew
    assert not waiting.is_over(2 * PATIENCE_S - 1, True, 5.0 + enough, NOTHING)
    assert waiting.is_over(2 * PATIENCE_S, True, 5.0 + 1.9 * enough, NOTHING)


def test_who_keeps_some_devices_is_slow_by_itself() -> None:
    """A first load may take longer than its patience: a gang would only take those devices from it."""
    waiting = Patience()
    assert not waiting.is_over(0.0, True, 0.0, {3})
    assert not waiting.is_over(PATIENCE_S - 1, True, 0.0, {3, 4})
    assert not waiting.is_over(PATIENCE_S, True, 0.0, {3})
    assert not waiting.is_over(PATIENCE_S + 1, True, 0.0, {5})  # others have taken it since
    assert waiting.is_over(2 * PATIENCE_S, True, 0.0, {5})


def test_who_has_nothing_to_do_does_not_wait() -> None:
    waiting = Patience()
    assert not waiting.is_over(0.0, True, 0.0, NOTHING)
    assert not waiting.is_over(PATIENCE_S, False, 0.0, NOTHING)
    assert not waiting.is_over(PATIENCE_S + 1, True, 0.0, NOTHING)
    assert waiting.is_over(2 * PATIENCE_S + 1, True, 0.0, NOTHING)


@dataclass
class Starved:
    """Has work, and nothing done of it, until it holds a gang."""

    worked_s: float = 0.0
    leases: frozenset[int] = NOTHING
    is_open: bool = True
    gangs: list[Lease] = field(default_factory=list)
    holds: bool = False
    let_go_of: int = 0

    def hold(self, gang: Lease) -> None:
        self.gangs.append(gang)
        self.holds = True

    def let_go(self, timeout_s: float) -> None:
        self.holds = False
        self.let_go_of += 1


@dataclass
class Stays(Starved):
    """Does not leave its gang."""

    ended: int = 0

    def let_go(self, timeout_s: float) -> None:
        raise WaitTimeoutError(f"not within {timeout_s:g} s")

    def end(self) -> None:
        self.ended += 1


class Asking:
    """As a `StepLease`; `answers` its questions for a gang, or never."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.ended = list(answers), list[tuple[Sequence[int], Phase]](), 0

    def add(self, devices: Sequence[int], phase: Phase, stop: threading.Event) -> Lease:
        self.asked.append((devices, phase))
        if not self.answers:
            stop.wait()
            raise InterruptedError
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: Lease = answer
        return found

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    monkeypatch.setattr(patience, "_LOOK_S", 0.001)


@pytest.mark.usefixtures("at_once")
def test_a_gang_is_held_until_the_block_ends() -> None:
    shared, lease, named = Starved(), Asking(LEASE), list[int]()
    with patient(shared, shared, lease, [0, 1], Phase.VALUE_COMPUTE, lambda: named.append(1), 1.0):  # type: ignore[arg-type]
        until(lambda: shared.gangs, "it has no gang")
    assert (lease.asked, named, shared.gangs) == ([([0, 1], Phase.VALUE_COMPUTE)], [1], [LEASE])
    assert (shared.holds, lease.ended) == (False, 0)  # the next segment's question gives it back


@pytest.mark.usefixtures("at_once")
def test_who_does_not_leave_its_gang_is_ended_before_others_get_the_devices() -> None:
    shared, lease = Stays(), Asking(LEASE)
    with (
        pytest.raises(WaitTimeoutError, match="not within 3 s"),
        patient(shared, shared, lease, [0, 1], Phase.VALUE_COMPUTE, list, 3.0),  # type: ignore[arg-type]
    ):
        until(lambda: shared.gangs, "it has no gang")
    assert shared.ended == 1


@pytest.mark.usefixtures("at_once")
def test_a_gang_on_which_all_replicas_failed_is_given_back_and_asked_for_anew() -> None:
    shared, lease = Starved(), Asking(LEASE)
    with patient(shared, shared, lease, [0, 1], Phase.VALUE_COMPUTE, list, 1.0):  # type: ignore[arg-type]
        until(lambda: shared.gangs, "it has no gang")
        shared.holds = False
        until(lambda: len(lease.asked) > 1, "it did not ask again")
        assert (lease.ended, shared.let_go_of) == (1, 1)


@pytest.mark.usefixtures("at_once")
def test_where_there_is_no_gang_it_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    shared, lease = Starved(), Asking(PipelineGoneError("job_1 has ended"))
    with patient(shared, shared, lease, [0, 1], Phase.VALUE_COMPUTE, list, 1.0):  # type: ignore[arg-type]
        until(lambda: len(lease.asked) > 1, "it did not ask again")
    assert not shared.gangs
    assert "no gang for [0, 1]: job_1 has ended" in caplog.text
