from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlix.cli import free
from rlix.cli.free import free_device, kept_with
from rlix.cli.pool import Pool
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import ControlStatus, LeaseState
from tests.cli.fakes import control, lease

STATUS = control(lease(1, "ft_1", (1, 2), LeaseState.QUARANTINED), lease(2, "ft_2", (0,)))


class Remote:
    """An actor's method that is called at once."""

    def __init__(self, answer: object) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._answer = answer

    def remote(self, *arguments: object) -> object:
        self.calls.append(arguments)
        return self._answer


class FakeOrchestrator:
    def __init__(self) -> None:
        self.give_up_device = Remote((STATUS.leases[0].lease,))


@pytest.fixture
def orchestrator(monkeypatch: pytest.MonkeyPatch) -> FakeOrchestrator:
    made = FakeOrchestrator()

    @contextmanager
    def running_pool(_settings: object) -> Iterator[Pool]:
        yield Pool(made, "")

    def status_source(_pool: Pool) -> Any:
        def status() -> ControlStatus:
            return STATUS

        return status

    monkeypatch.setattr(free, "running_pool", running_pool)
    monkeypatch.setattr(free, "StatusSource", status_source)
    monkeypatch.setattr(free, "get", lambda answer, **_: answer)
    return made


def test_what_is_freed_is_said_before_and_only_done_on_a_persons_word(
    orchestrator: FakeOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    assert free_device(2, sure=False, ask=no) == 1
    assert "1–2" in asked[0]
    assert "devices 1–2 in quarantine, held by ft_1" in capsys.readouterr().out
    assert orchestrator.give_up_device.calls == []
    assert free_device(2, sure=True, ask=no) == 0
    assert orchestrator.give_up_device.calls == [(2,)]
    assert len(asked) == 1
    assert "free again: 1–2" in capsys.readouterr().out


def test_a_device_that_is_not_quarantined_is_left_alone(orchestrator: FakeOrchestrator) -> None:
    with pytest.raises(SpecError, match="rlix free 0: that device is not in quarantine; those in quarantine: 1–2"):
        free_device(0, sure=True, ask=lambda _: True)
    with pytest.raises(SpecError, match="not in quarantine; none is"):
        kept_with(control(lease(1, "ft_1", (0,))), 0)
    assert orchestrator.give_up_device.calls == []
