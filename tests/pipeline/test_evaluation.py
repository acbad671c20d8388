"""Evaluation on held-out prompts: it is asked when it is due, and training does not notice it."""

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlix.pipeline import base
from rlix.pipeline.base import Pipeline
from rlix.pipeline.evaluation import evaluation_metrics, majority, pass_at
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.samples import End, Sample, Samples
from rlix.pipeline.sources.base import SourceFailedError
from rlix.pipeline.spec.evaluation import EvaluationSpec
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.pipeline.spec.source import ChatSpec, SourceSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.types import Phase
from tests.pipeline.in_process import Generator, InProcess
from tests.pipeline.test_composition import job
from tests.pipeline.training_jobs import learnt_of, rows

HELD_OUT = {"every": 2, "prompts": 3, "samples_per_prompt": 2, "temperature": 0.0}


# With `ahead` alone the version of a turn, or of a further round, depends on who was faster.
REPRODUCIBLE = [(source, schedule) for source in ("task", "environment") for schedule in ("on_policy", "one_version")]


@pytest.mark.parametrize(("source", "schedule"), REPRODUCIBLE)
def test_training_is_the_same_with_and_without(source: str, schedule: str, tmp_path: Path) -> None:
    algorithm = {"name": "dapo", "minibatches": 2}
    made = [
        InProcess(job(source, schedule, algorithm, tmp_path, steps=5, evaluation=given), tmp_path)
        for given in (None, HELD_OUT)
    ]
    plain, evaluated = (pipeline.run_steps() for pipeline in made)
    assert [learnt_of(row) for row in evaluated] == [learnt_of(row) for row in plain]
    assert [("eval/reward" in row, "evaluation_s" in row) for row in evaluated] == [
        (due, due) for due in (False, True, False, True, True)
    ]


@pytest.mark.parametrize("schedule", ["on_policy", "ahead", "one_version"])
def test_the_same_prompts_every_time_greedily_and_with_the_newest_weights(schedule: str, tmp_path: Path) -> None:
    pipeline = InProcess(job("task", schedule, "grpo", tmp_path, evaluation=HELD_OUT | {"max_new_tokens": 3}), tmp_path)
    metrics = pipeline.run_steps()
    asked = [(t, version) for t, version in pipeline.rollouts.answered if t.id.startswith("evaluation/")]
    first, second = asked[:6], asked[6:]
    assert [version for _, version in asked] == [2] * 6 + [4] * 6
    assert [(t.prompt_ids, t.seed) for t, _ in first] == [(t.prompt_ids, t.seed) for t, _ in second]
    assert all(t.sampling.temperature == 0 and t.sampling.max_new_tokens == 3 for t, _ in asked)
    trained = {t.prompt_ids for t, _ in pipeline.rollouts.answered if not t.id.startswith("evaluation/")}
    assert not {t.prompt_ids for t, _ in first} & trained
    for row in metrics[1::2]:
        assert row["eval/reward_best"] >= row["eval/reward"]
        assert row["eval/pass@2"] >= row["eval/pass@1"] == row["eval/exact"]
        assert row["eval/pass@2"] >= row["eval/maj@2"] >= 0
        assert row["eval/trajectories"] == 6


def test_several_sets_have_names_and_what_is_said_beside_them_holds_for_all(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "77>", "answer": "77"}\n')
    held_out = {"data": {"path": str(tmp_path / "held.jsonl")}, "rewards": ["exact_match"]}
    sets = {"rows": {"source": held_out}, "digits": {"prompts": 2, "samples_per_prompt": 1}}
    plain = InProcess(job("task", "one_version", "grpo", tmp_path, steps=3), tmp_path).run_steps()
    asked = {**HELD_OUT, "baseline": True, "sets": sets}
    spec = job("task", "one_version", "grpo", tmp_path, steps=3, evaluation=asked)
    pipeline = InProcess(spec, tmp_path)
    rows = pipeline.run_steps()
    assert [learnt_of(row) for row in rows] == [learnt_of(row) for row in plain]
    assert [row.get("eval/rows/trajectories") for row in rows] == [None, 2, 2]
    assert [row.get("eval/digits/trajectories") for row in rows] == [None, 2, 2]
    assert [row.get("baseline/rows/trajectories") for row in rows] == [2, None, None]
    versions = {t.id.split("/")[1]: version for t, version in pipeline.rollouts.answered if t.purpose}
    assert versions == {"0": 0, "2": 2, "3": 3}
    assert spec.evaluation is not None
    assert spec.evaluation.best == "eval/rows/reward"
    assert JobSpec.model_validate(spec.model_dump()) == spec


def test_what_most_samples_say_is_right_wrong_or_one_of_several() -> None:
    def answered(*said: str | None, right: str = "4") -> list[Sample]:
        return [Sample(str(i), (), 0.0, each == right, End.DONE, answer=each) for i, each in enumerate(said)]

    said = (("4", "4", "5"), ("5", "5", "4"), ("4", "5", "6"), (None, None, "4"), (None, None))
    assert [majority(answered(*each)) for each in said] == [1.0, 0.0, pytest.approx(1 / 3), 1.0, 0.0]
    two = [*answered("4", "4", "5"), *answered("5", "5", "4")]
    metrics = evaluation_metrics(Samples(two, 3, {"exact": 0.5}))
    assert (metrics["eval/maj@3"], metrics["eval/pass@3"]) == (0.5, 1.0)
    assert "eval/maj@2" not in evaluation_metrics(Samples(answered(None, None), 2)), "nobody says what was answered"


def test_pass_at_k_is_the_chance_that_one_of_k_is_right() -> None:
    """By drawing every subset."""
    for samples, right, k in product(range(1, 7), range(7), range(1, 7)):
        if right <= samples and k <= samples:
            drawn = list(combinations([i < right for i in range(samples)], k))
            assert pass_at(k, samples, right) == pytest.approx(mean(map(any, drawn)))


def test_what_fails_before_an_evaluation_is_the_jobs_failure(tmp_path: Path) -> None:
    class Fails(InProcess):
        def settle(self) -> None:
            raise SourceFailedError("every reward of a step failed")

    with pytest.raises(SourceFailedError, match="every reward"):
        Fails(job("task", "one_version", "grpo", tmp_path, evaluation=HELD_OUT), tmp_path).run_steps()


@pytest.mark.parametrize("there", [1, 3])
def test_held_out_data_have_a_source_of_their_own(there: int, tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{number}7>", "answer": "77"}}\n' for number in range(7, 7 + there)]
    (tmp_path / "held.jsonl").write_text("".join(lines))
    held_out = {"data": {"path": str(tmp_path / "held.jsonl")}, "rewards": ["exact_match"]}
    spec = job("data", "on_policy", "grpo", tmp_path, evaluation={**HELD_OUT, "prompts": 2, "source": held_out})
    pipeline = InProcess(spec, tmp_path)
    metrics = pipeline.run_steps()
    assert metrics[1]["eval/trajectories"] == 2 * min(there, 2)  # each row once, and no more than are asked for
    asked = {t.prompt_ids for t, _ in pipeline.rollouts.answered if t.id.startswith("evaluation/")}
    trained = {t.prompt_ids for t, _ in pipeline.rollouts.answered if not t.id.startswith("evaluation/")}
    assert len(asked) == min(there, 2)
    assert not asked & trained


def test_the_conversation_is_the_jobs_unless_the_evaluation_has_its_own() -> None:
    chat = {"system": "Be brief.", "options": {"enable_thinking": False}, "history": "keep"}
    data = SourceSpec.model_validate({"data": {"path": "a.jsonl"}, "rewards": ["exact_match"], "chat": chat})
    rows = {"data": {"path": "b.jsonl"}, "rewards": ["exact_match"]}

    def asked(source: dict[str, Any] | None, of: SourceSpec = data) -> ChatSpec:
        return EvaluationSpec.model_validate({"every": 1, "source": source}).held_out(of).chat

    assert asked(None) == data.chat
    assert asked(rows) == ChatSpec(system="Be brief.", options={"enable_thinking": False})
    assert asked({"environment": "digit_lookup"}) == data.chat.model_copy(update={"system": None})
    assert asked({**rows, "chat": {}}) == ChatSpec()


def test_what_is_wrong_with_the_section_is_said_by_field(tmp_path: Path) -> None:
    def problem(trained_on: str, **evaluation: Any) -> str:
        with pytest.raises(ValueError, match="evaluation") as caught:
            job(trained_on, "on_policy", "grpo", tmp_path, evaluation={**HELD_OUT, **evaluation})
        return str(caught.value)

    assert "evaluation.source: is missing: data that are trained on" in problem("data")
    same = {"data": {"path": str(tmp_path / "rows.jsonl")}, "rewards": ["exact_match"]}
    assert "evaluation.source.data.path: is what is trained on" in problem("data", source=same)
    named = problem("data", sets={"a": {"source": same}, "b": {"source": {"task": "sort_digit"}}})
    assert "evaluation.sets.a.source.data.path: is what is trained on" in named
    assert "evaluation.sets.b.source.task.name: must be sort_digits" in named
    assert "evaluation.source: is empty" in problem("task", source={})
    assert "evaluation.source.task.name: must be sort_digits" in problem("task", source={"task": "sort_digit"})
    assert "evaluation.source.rewards" in problem("data", source={"data": {"path": "x.jsonl"}})
    assert "best" in problem("task", best="reward")
    assert "evaluation.max_new_tokens: is 2, but an answer takes 3 tokens" in problem("task", max_new_tokens=2)


def test_paths_are_those_of_the_file_and_what_is_missing_is_said(tmp_path: Path) -> None:
    text = """
name: job
steps: 1
source: {task: sort_digits}
rollout: {max_new_tokens: 5}
clusters: {actor_train: {gpus: 1}}
evaluation: {every: 1, source: {data: {path: held.jsonl}, rewards: exact_match}}
"""
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"job\.yaml:7: evaluation\.source\.data\.path: there is no file"):
        load_job(tmp_path / "job.yaml")
    (tmp_path / "held.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n')
    spec = load_job(tmp_path / "job.yaml")
    assert spec.evaluation is not None
    assert spec.evaluation.source is not None
    assert spec.evaluation.source.data is not None
    assert spec.evaluation.source.data.path == str(tmp_path / "held.jsonl")
    (tmp_path / "again.yaml").write_text(spec.to_yaml())
    assert load_job(tmp_path / "again.yaml") == spec


class Stuck(Generator):
    """Answers nothing that is asked for an evaluation."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open: list[Future[Any]] = []
        self.given_up: list[str | None] = []
        self.asked: list[str] = []

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]":
        if not trajectories[0].purpose:
            return super().submit(step, trajectories)
        self.asked += [trajectory.id for trajectory in trajectories]
        self.open += (asked := [Future[Trajectory]() for _ in trajectories])
        return asked

    def abandon(self, reason: Exception, purpose: str | None = "", adapter: str = "") -> None:
        self.given_up.append(purpose)
        for future in self.open:
            if future.set_running_or_notify_cancel():
                future.set_exception(reason)
        self.open = []


class StuckInEvaluation(InProcess):
    generator = Stuck


@pytest.mark.parametrize(("source", "schedule"), [("task", "ahead"), ("environment", "one_version")])
def test_one_that_takes_too_long_costs_training_nothing(
    source: str, schedule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = job(source, schedule, "grpo", tmp_path, steps=4)
    plain = InProcess(spec, tmp_path).run_steps()
    late = spec.model_copy(update={"evaluation": EvaluationSpec(**HELD_OUT), "rollout": short(spec)})
    pipeline = StuckInEvaluation(late, tmp_path)
    rows = pipeline.run_steps()
    assert [learnt_of(row) for row in rows] == [learnt_of(row) for row in plain]
    assert not any("eval/reward" in row for row in rows)
    assert pipeline.rollouts.given_up == ["evaluation"] * 2
    assert len(set(pipeline.rollouts.asked)) == len(pipeline.rollouts.asked), "a replica may still be at those before"
    assert caplog.text.count("the evaluation after") == 2


def short(spec: JobSpec) -> Any:
    return spec.rollout.model_copy(update={"timeout_s": 0.3})


class Toy(Pipeline):
    """Its evaluations get better, then worse; it is asked to stop `when` the seventh step trains, or after it."""

    when = "evaluate"

    def setup(self) -> None:
        self.done = 0

    def step(self, step: int) -> dict[str, float]:
        self.note_entered(Phase.ACTOR_TRAINING)
        self.done = step + 1
        self.may_stop("step")
        return {"reward": 0.0}

    def settle(self) -> None:
        self.may_stop("settle")

    def evaluate(self, done: int) -> dict[str, float]:
        self.may_stop("evaluate")
        return {"eval/reward": {2: 0.1, 4: 0.8, 6: 0.3}[done]}

    def may_stop(self, where: str) -> None:
        if self.done == 7 and where == self.when:
            self.request_stop()
            raise InterruptedError("the job was asked to stop")

    def save(self, path: Path) -> None:
        (path / "done").write_text(str(self.done))


class Unevaluated(Pipeline):
    def setup(self) -> None: ...

    def step(self, step: int) -> dict[str, float]:
        return {"reward": 0.0}


def spec_of(**changes: Any) -> JobSpec:
    values = load_job("copy_digits").model_dump() | {"steps": 7, "evaluation": {"every": 2}, "checkpoint": {"every": 5}}
    return JobSpec.model_validate(values | changes)


def test_half_a_step_is_in_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who resumes would take it again from weights that have learnt from it."""
    monkeypatch.setattr(base, "JobClient", MagicMock())
    monkeypatch.setattr(Toy, "when", "step")
    assert Toy("ft_1", JobConfig(spec_of(evaluation={"every": 9}), tmp_path / "job")).run().state == "stopped"
    assert [path.name for path in (tmp_path / "job" / "checkpoints").glob("step_*")] == ["step_5"]


@pytest.mark.parametrize("when", ["settle", "evaluate"])
def test_the_frame_evaluates_when_it_is_due_and_keeps_the_best(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "JobClient", MagicMock())
    monkeypatch.setattr(Toy, "when", when)
    pipeline = Toy("ft_1", JobConfig(spec_of(), tmp_path / "job"))
    assert pipeline.run().state == "finished"
    found = {row["step"]: row.get("eval/reward") for row in rows(tmp_path / "job" / "metrics.jsonl")}
    assert found == {0: None, 1: 0.1, 2: None, 3: 0.8, 4: None, 5: 0.3, 6: None}
    assert pipeline.status().evaluation == 0.3
    checkpoints = tmp_path / "job" / "checkpoints"
    assert (checkpoints / "best" / "done").read_text() == "4"
    assert {path.name for path in checkpoints.glob("step_*")} == {"step_4", "step_5", "step_7"}
    assert (checkpoints / "step_7" / "done").read_text() == "7"  # the interrupted evaluation took nothing back


def test_a_pipeline_that_cannot_be_evaluated_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "JobClient", MagicMock())
    with pytest.raises(SpecError, match="Unevaluated has no method 'evaluate'"):
        Unevaluated("ft_1", JobConfig(spec_of(), tmp_path / "job")).run()


class Interrupted(Pipeline):
    """A system call of its own breaks off, which is nobody's wish for an end."""

    where = "step"

    def setup(self) -> None: ...

    def step(self, step: int) -> dict[str, float]:
        if self.where == "step" and step == 1:
            raise InterruptedError("Interrupted system call")
        return {"reward": 0.0}

    def evaluate(self, done: int) -> dict[str, float]:
        raise InterruptedError("Interrupted system call")


class InterruptedEvaluation(Interrupted):
    where = "evaluation"


def test_only_who_is_asked_to_stop_ends_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "JobClient", MagicMock())
    pipeline = Interrupted("ft_1", JobConfig(spec_of(), tmp_path / "job"))
    with pytest.raises(InterruptedError):
        pipeline.run()
    assert pipeline.status().state == "failed"
    assert "Interrupted system call" in str(pipeline.status().error)
    evaluated = InterruptedEvaluation("ft_2", JobConfig(spec_of(), tmp_path / "evaluated"))
    assert evaluated.run().state == "finished"
    assert "the evaluation after 2 steps failed: Interrupted system call" in caplog.text
