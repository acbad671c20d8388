"""What a program says to the control plane, without one: it is checked first, and what people see never fails."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.control import client
from rlix.control.program import Program
from rlix.control.rollout_lease import RolloutLease
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Progress, Registration, RolloutAnswer
from rlix.protocol.types import Phase

NAN = float("nan")


class Answers:
    """A scheduler that refuses what the real one refuses of a demand."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def ask(self, method: str, *args: Any, timeout_s: float) -> object:
        self.asked.append((method, args))
        if method == "report_demand" and args[-1].trajectories != args[-1].trajectories:
            raise SpecError("a demand needs whole numbers")
        answers = {"registration": Registration("job_1", "ns", (), "mine"), "poll_rollout": RolloutAnswer()}
        return answers.get(method, ())


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers()
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(client, "Patient", lambda *_, **__: answers)
    return answers


def test_a_rollout_whose_demand_was_refused_is_not_open(answers: Answers) -> None:
    program = Program("mine", client.JobClient("job_1"))
    wrong: Any = NAN
    with pytest.raises(SpecError) as refused:
        program.rollout("r", demand=wrong)
    assert program.rollout("r", demand=5).cluster == "r"
    assert "whole numbers" in str(refused.value)


@pytest.mark.parametrize("wait_s", [NAN, -1.0, 1e9, float("inf"), "5", None, True])
def test_a_wait_without_a_bound_is_refused_before_it_begins(answers: Answers, wait_s: Any) -> None:
    job = client.JobClient("job_1")
    with pytest.raises(SpecError, match="wait_s must be seconds from 0 to 3600, got"):
        job.poll_rollout("r", (), (), wait_s)
    with pytest.raises(SpecError, match=r"wait_s must be seconds from 0 to 1e\+12, got"):
        RolloutLease(job, "r").poll(wait_s if wait_s != 1e9 else 1e13)
    assert answers.asked == []
    assert job.poll_rollout("r", (), (), 3600) == RolloutAnswer()


@pytest.mark.parametrize("timeout_s", [1e30, NAN, 0, True])
def test_a_timeout_is_refused_with_what_it_may_be(answers: Answers, timeout_s: Any) -> None:
    with pytest.raises(SpecError, match=r"timeout_s must be seconds above 0, at most 1e\+12, or None to wait on"):
        client.JobClient("job_1").acquire("g", Phase.ACTOR_TRAINING, timeout_s)
    assert answers.asked == []


class Broken:
    def __float__(self) -> float:
        raise RuntimeError("no single element")


@pytest.mark.parametrize(
    ("step", "steps", "values"),
    [
        (3, 0, {"loss": NAN}),
        (3, 0, {"loss": 10**400}),
        (3, 0, {"loss": "3"}),
        (3, 0, {"loss": True}),
        (3, 0, {"loss": [1]}),
        (3, 0, {"loss": Broken()}),
        (3, 0, {"": 2.0}),
        (3, 0, {"\x1b[31mred": 2.0}),
        (3, 0, {"two\nlines": 2.0}),
        (3, 0, {"k" * 100_000: 2.0}),
        (3, NAN, {}),
        (3, "x", {}),
    ],
)
def test_a_value_that_cannot_be_shown_is_dropped_with_one_warning(
    answers: Answers, caplog: pytest.LogCaptureFixture, step: Any, steps: Any, values: dict[str, Any]
) -> None:
    program = Program("mine", client.JobClient("job_1"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            program.metrics(step, steps, reward=1, **values)
    assert answers.asked[-1] == ("report_progress", ("job_1", Progress(3, 0, {"reward": 1.0})))
    assert len(caplog.records) == 1
    assert len(text := caplog.records[0].getMessage()) < 400
    assert text.isprintable()


@pytest.mark.parametrize("step", [NAN, float("inf"), 10**30, 1e300, "3", "x", None])
def test_a_step_that_is_none_is_not_told(answers: Answers, caplog: pytest.LogCaptureFixture, step: Any) -> None:
    program = Program("mine", client.JobClient("job_1"))
    before = len(answers.asked)
    with caplog.at_level(logging.WARNING):
        program.metrics(step, 10, loss=1.0)
        program.metrics(step, 10, loss=1.0)
    assert len(answers.asked) == before
    assert len(caplog.records) == 1
