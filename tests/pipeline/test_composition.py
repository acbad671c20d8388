"""Any source goes with any schedule and any algorithm: any two of them take real steps together on a tiny model."""

import json
import math
from itertools import product
from operator import le
from pathlib import Path
from typing import Any

import pytest

from rlix.pipeline.algorithms import Algorithm
from rlix.pipeline.algorithms.choice import CLASSES
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.planning.profiling import trials
from rlix.pipeline.schedules.choice import CLASSES as SCHEDULE_CLASSES
from rlix.pipeline.spec.algorithm import ALGORITHMS
from rlix.pipeline.spec.declared import DeclaredSpeedSpec
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.pipeline.spec.model import TinyModel
from rlix.pipeline.spec.schedule import SCHEDULES, ScheduleSpec
from rlix.protocol.errors import SpecError
from tests.pipeline import sandboxes
from tests.pipeline.in_process import InProcess

SOURCES: dict[str, dict[str, Any]] = {
    "task": {"task": {"name": "sort_digits", "options": {"digits": 2}}},
    "data": {"data": {"path": "rows.jsonl"}, "rewards": ["exact_match", {"name": "token_match", "weight": 0.5}]},
    "environment": {"environment": {"name": f"{sandboxes.__file__}:Sums", "attempts": 1, "max_turns": 3}},
}
AHEAD = {
    "on_policy": {"name": "on_policy"},
    "ahead": {"name": "ahead", "options": {"max_staleness": 2, "ahead": 2}},
    "one_version": {"name": "ahead", "options": {"in_flight": "finish"}},
}
PLAYED = [name for name in CLASSES if name not in ("sft", "dpo")]
# Every two of them meet; none knows more of the others than the samples.
COMBINATIONS = [
    *((s, ("on_policy", "ahead")[(i + j) % 2], a) for (i, s), (j, a) in product(enumerate(SOURCES), enumerate(PLAYED))),
    *zip(SOURCES, ("one_version",) * 3, ("grpo", "ppo", "grpo"), strict=True),
]


def job(source: str, schedule: str, algorithm: Any, folder: Path, **changes: Any) -> JobSpec:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": f"{i}"}) + "\n" for i in range(10)))
    given = json.loads(json.dumps(SOURCES[source]).replace("rows.jsonl", str(rows)))
    values = {
        "name": "tiny",
        "steps": 4,
        "source": given,
        "schedule": AHEAD[schedule],
        "algorithm": algorithm,
        "model": {"hidden_size": 16, "layers": 1, "heads": 2},
        "warmup": {"steps": 1, "batch_size": 4},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 4},
        "optimizer": {"learning_rate": 1e-3},
        "clusters": {"actor_train": {"gpus": 1}},
    }
    return JobSpec.model_validate(values | changes)


def test_every_name_has_options_and_a_class() -> None:
    assert {name: cls.Options for name, cls in CLASSES.items()} == ALGORITHMS
    assert {name: cls.Options for name, cls in SCHEDULE_CLASSES.items()} == SCHEDULES


@pytest.mark.parametrize(("source", "schedule", "algorithm"), COMBINATIONS)
def test_any_two_of_them_take_steps_together(source: str, schedule: str, algorithm: str, tmp_path: Path) -> None:
    options = {}
    if algorithm == "distill":
        like = TinyModel(hidden_size=16, layers=1, heads=2)
        options = {"teacher": str(write_tiny_model(like, tmp_path / "teacher", seed=5))}
    chosen = {"name": algorithm, "minibatches": 2, "options": options}
    pipeline = InProcess(job(source, schedule, chosen, tmp_path), tmp_path)
    rows = pipeline.run_steps()
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["trajectories"] == 8 for row in rows)
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
    assert all(("value_loss" in row) == (algorithm == "ppo") for row in rows if "grad_norm" in row)
    assert all(("resampled" in row) == (algorithm == "dapo") for row in rows)
    assert all(("importance" in row) == (row["staleness_max"] > 0) for row in rows)
    assert all(row["mismatch_kl"] > 0 and row["mismatch_ratio_max"] > 1 for row in rows if "grad_norm" in row)
    ahead = {"on_policy": 0, "ahead": 2, "one_version": 1}[schedule]
    bounds = [min(step, ahead) for step in range(4)]
    ages = [row["staleness_max"] for row in rows]
    # What replaces a group without spread may be younger.
    assert all(map(le, ages, bounds)) if algorithm == "dapo" else ages == bounds
    assert pipeline.rollouts.published == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_schedule_of_the_users_that_works_ahead_is_found_out_by_the_tokens(minibatches: int, tmp_path: Path) -> None:
    """It says nothing of itself, and every other step learns from what older weights made."""
    spec = job("task", "on_policy", {"minibatches": minibatches}, tmp_path)
    spec = spec.model_copy(update={"schedule": ScheduleSpec(name="tests.pipeline.own_parts:Twice")})
    pipeline = InProcess(spec, tmp_path)
    rows = pipeline.run_steps()
    assert [row["staleness_max"] for row in rows] == [0, 1, 0, 1]
    assert ["importance" in row for row in rows] == [False, True, False, True]
    assert pipeline.phases.count("OLD_LOG_PROBS") == (2 if minibatches == 1 else 4)
    cold = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"temperature": 0.5})})
    with pytest.raises(SpecError, match="step 1 learns from older weights' tokens, and importance weights need"):
        InProcess(cold, tmp_path).run_steps()


@pytest.mark.parametrize(("source", "schedule"), [("task", "ahead"), ("data", "on_policy"), ("environment", "ahead")])
def test_of_more_prompts_than_a_step_learns_from_the_longest_are_left_out(
    source: str, schedule: str, tmp_path: Path
) -> None:
    rollout = {"prompts_per_step": 2, "spare_prompts": 3, "samples_per_prompt": 4, "max_new_tokens": 4}
    pipeline = InProcess(job(source, schedule, "grpo", tmp_path, rollout=rollout), tmp_path)
    rows = pipeline.run_steps()
    assert all(row["trajectories"] == 8 and row["grad_norm"] >= 0 for row in rows)
    if source == "environment":
        return  # some fail, and their groups come last
    generated = {trajectory.id: len(trajectory.token_ids) for trajectory, _ in pipeline.rollouts.answered}
    assert len(generated) == 4 * 5 * 4, "all are begun"
    for step, row in enumerate(rows):
        groups: dict[int, list[int]] = {}
        for seat, count in generated.items():
            _, of_step, number, _ = seat.split("/")
            if of_step == str(step):
                groups.setdefault(int(number), []).append(count)
        shortest = sorted(groups, key=lambda number: (max(groups[number]), number))[:2]
        assert row["tokens"] == sum(sum(groups[number]) for number in shortest)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp"])
def test_one_sample_of_a_prompt_is_enough_for_who_compares_none(algorithm: str, tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 1, "max_new_tokens": 4}
    rows = InProcess(job("environment", "on_policy", algorithm, tmp_path, rollout=rollout), tmp_path).run_steps()
    assert all(row["trajectories"] == 4 and row["grad_norm"] > 0 for row in rows)
    with pytest.raises(ValueError, match="samples_per_prompt: is 1, and dapo compares"):
        job("task", "on_policy", "dapo", tmp_path, rollout=rollout)
    with pytest.raises(ValueError, match="resample_rounds: replaces prompts whose samples have equal rewards"):
        job("task", "on_policy", {"name": algorithm, "resample_rounds": 1}, tmp_path, rollout=rollout)


@pytest.mark.parametrize("on_stale", ["drop", "rescore"])
def test_what_is_too_old_is_left_out_or_counts_as_new(
    on_stale: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trajectories of three steps are on the way, where two are allowed."""
    spec = job("task", "ahead", "grpo", tmp_path)
    rule = {"max_staleness": 1, "ahead": 2, "on_stale": on_stale}
    schedule = spec.schedule.model_copy(update={"options": rule})
    rows = InProcess(spec.model_copy(update={"schedule": schedule}), tmp_path).run_steps()
    assert [row["staleness_max"] for row in rows] == ([0, 1, 0, 0] if on_stale == "drop" else [0, 1, 2, 2])
    assert [row["dropped"] for row in rows] == ([0, 0, 8, 8] if on_stale == "drop" else [0] * 4)
    assert ["grad_norm" in row for row in rows] == [True, True, *[on_stale == "rescore"] * 2]  # whether there was any
    assert [row.get("importance") for row in rows[2:]] == ([None] * 2 if on_stale == "drop" else [1.0] * 2)
    assert sum("teaches nothing" in line for line in caplog.messages) == (on_stale == "drop")


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "reinforce_pp", "ppo", "tests.pipeline.own_parts:Best"])
def test_a_kl_coefficient_brings_a_reference(algorithm: str, tmp_path: Path) -> None:
    own = {"sharpness": 2.0} if ":" in algorithm else {}
    chosen = {"name": algorithm, "options": {"kl_coefficient": 0.1, **own}}
    pipeline = InProcess(job("environment", "on_policy", chosen, tmp_path), tmp_path)
    rows = pipeline.run_steps()
    assert "REFERENCE_LOG_PROBS" in pipeline.phases
    assert all(row["kl"] >= 0 for row in rows)


def test_synchronous_jobs_may_weight_what_the_sampler_made(tmp_path: Path) -> None:
    pipeline = InProcess(job("task", "on_policy", {"importance_cap": 1.5}, tmp_path), tmp_path)
    rows = pipeline.run_steps()
    assert "OLD_LOG_PROBS" in pipeline.phases
    assert all(0 < row["importance"] <= 1.5 for row in rows)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_how_far_the_sampler_is_from_the_trainer_is_told(minibatches: int, tmp_path: Path) -> None:
    """By hand, of the log-probs that both had; with one update per step nothing is scored for it."""
    pipeline = InProcess(job("task", "on_policy", {"minibatches": minibatches}, tmp_path, steps=1), tmp_path)
    kept: list[Any] = []
    begin = Algorithm.begin

    def noted(self: Any, samples: Any, pad_id: int) -> Any:
        batch, needs = begin(self, samples, pad_id)
        tokens = {"input_ids": batch["input_ids"], "mask": batch["mask"]}
        now = pipeline.actor.module.log_probs(tokens, 1.0)
        kept.append((now - batch["sampled_log_probs"])[batch["mask"].bool()])
        return batch, needs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Algorithm, "begin", noted)
        (row,) = pipeline.run_steps()
    (difference,) = kept
    assert row["mismatch_kl"] == pytest.approx(float((difference.exp() - 1 - difference).mean()), rel=1e-4)
    assert row["mismatch_ratio_max"] == pytest.approx(float(difference.abs().max().exp()), rel=1e-4)
    assert ("OLD_LOG_PROBS" in pipeline.phases) == (minibatches == 2)


def test_what_was_cut_off_is_left_out_of_the_loss(tmp_path: Path) -> None:
    pipeline = InProcess(job("task", "on_policy", {"mask_truncated": True}, tmp_path), tmp_path)
    pipeline.setup()
    try:
        pipeline.initialize()
        samples = pipeline.sample(0)
        learnt = pipeline.scored(samples)["mask"].any(dim=1).tolist()
    finally:
        pipeline.teardown()
    assert learnt == [sample.end != "length" for sample in samples.samples]
    assert samples.curves["truncated"] == 1 - sum(learnt) / len(learnt) > 0


def test_curves_are_those_of_all_that_was_sampled(tmp_path: Path) -> None:
    plain, filtered = (
        InProcess(job("task", "on_policy", {"resample_rounds": rounds}, tmp_path, steps=1), tmp_path).run_steps()[0]
        for rounds in (0, 5)
    )
    assert filtered["resampled"] > 0
    assert filtered["tokens"] > plain["tokens"]
    assert filtered["reward"] == plain["reward"]
    assert filtered["trajectories_digest"] != plain["trajectories_digest"]


def test_a_declared_speed_changes_how_long_steps_last_and_nothing_else(tmp_path: Path) -> None:
    declared = {"token_ms": 100.0, "trained_token_ms": 10.0, "scored_token_ms": 5.0}
    spec = job(
        "task", "on_policy", {"name": "grpo", "options": {"kl_coefficient": 0.1}}, tmp_path, warmup=None, steps=2
    )
    plain = InProcess(spec, tmp_path / "plain").run_steps()
    slow = spec.model_copy(update={"declared_speed": DeclaredSpeedSpec.model_validate(declared)})
    rows = InProcess(slow, tmp_path / "declared").run_steps()
    for before, after in zip(plain, rows, strict=True):
        assert {k: v for k, v in after.items() if not k.endswith("_s")} == {
            k: v for k, v in before.items() if not k.endswith("_s")
        }
        assert after["train_s"] >= 8 * after["context"] * 0.010, "eight samples at 10 ms for each token"
        assert (after["late_s"], after["decode_late_s"]) >= (0.0, 0.0)
        assert not {"late_s", "decode_late_s"} & before.keys()


@pytest.mark.parametrize("source", ["data", "environment"])
def test_a_profile_takes_steps_of_its_sizes(source: str, tmp_path: Path) -> None:
    spec = job(source, "ahead", {"name": "ppo"}, tmp_path)
    (trial,) = trials(spec, 1, [1], [2, 1], 1)
    pipeline = InProcess(trial.spec, tmp_path / "run")
    assert [row["trajectories"] for row in pipeline.run_steps()] == [4, 8, 4]
    assert "OLD_LOG_PROBS" in pipeline.phases  # as ahead, though everything is in turn
    assert load_job(write(tmp_path, trial.spec)) == trial.spec


def write(folder: Path, spec: JobSpec) -> Path:
    path = folder / "spec.yaml"
    path.write_text(spec.to_yaml())
    return path
