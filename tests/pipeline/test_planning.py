"""Jobs that leave their clusters to a plan: what is planned, from what, and what the schedule allows."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from rlix.cli import plans, run
from rlix.cli.answers import CheckAnswer, PlanAnswer
from rlix.cli.main import app
from rlix.flow.planner import Mode, Point
from rlix.flow.profiler.profile import PartProfile, Profile
from rlix.monitor.records import load_run
from rlix.pipeline.planning.choose import choose, profile_path, unplanned
from rlix.pipeline.planning.declared import answer_lengths, declared_profile
from rlix.pipeline.planning.graph import widths_of
from rlix.pipeline.planning.profiling import measured, trials
from rlix.pipeline.spec.changes import spec_changes
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.protocol.errors import SpecError
from tests.monitor.synthetic import span, write_run

SPEED = {"token_ms": 100.0, "knee": 48.0, "kv_us": 0.0, "prefill_us": 1000.0, "trained_token_ms": 1.0}
SPEED |= {"scored_token_ms": 0.5, "expand_s": 0.3, "sync_s": 0.1, "shrink_s": 0.2, "move_s": 0.25}


def job(**changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "job",
        "steps": 4,
        "source": "copy",
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 10},
        "declared_speed": SPEED,
        "plan": {"prompt_tokens": 10.0},
    }
    values |= {"source": {"task": "copy_digits"}, **changes}
    return JobSpec.model_validate_json(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_tables_from_a_declared_speed_are_what_the_work_would_last() -> None:
    parts = declared_profile(job(algorithm={"options": {"kl_coefficient": 0.1}}), 4, off_policy=False).parts
    infer, train, reference = (parts[name] for name in ("actor_infer", "actor_train", "reference"))
    # 16 of 32 on a replica: 16 × 10 tokens of prompts and ten steps; new weights come while the trainer goes
    assert infer.table.seconds(2, 32) == pytest.approx(0.16 + 10 * 0.1)
    assert (infer.load_s, infer.offload_s) == (pytest.approx(0.3), 0.2)
    slow = declared_profile(job(declared_speed={**SPEED, "sync_s": 0.35}), 4, off_policy=False).parts["actor_infer"]
    assert slow.table.seconds(2, 32) == pytest.approx(0.16 + 10 * 0.1 + 0.1)  # what is left of it then
    assert train.table.seconds(4, 32) == pytest.approx(8 * 20 * 1e-3 + 2 * 0.25)
    assert reference.table.seconds(4, 32) == pytest.approx(8 * 20 * 0.5e-3 + 2 * 0.25)
    assert (train.load_s, train.offload_s) == (0, 0)  # it pays for that in every phase


def test_work_that_is_done_more_often_lasts_longer() -> None:
    def trained(**changes: Any) -> float:
        ahead = "schedule" in changes
        parts = declared_profile(job(**changes), 1, off_policy=ahead).parts
        return parts["actor_train"].table.seconds(1, 32)

    once = trained()
    assert once == pytest.approx(32 * 20 * 1e-3 + 0.5)
    assert trained(algorithm={"epochs": 2}) == pytest.approx(2 * 0.64 + 0.32 + 2 * 0.5)  # and old log-probs
    assert trained(schedule="ahead") == pytest.approx(0.64 + 0.32 + 2 * 0.5)  # to weigh samples by their age
    reference = {"lora": {}, "algorithm": {"options": {"kl_coefficient": 0.1}}}
    assert trained(**reference) == pytest.approx(0.64 + 0.32 + 2 * 0.5)  # the model without its adapter
    ppo = declared_profile(job(algorithm="ppo"), 1, off_policy=False).parts
    ahead = declared_profile(job(schedule="ahead"), 1, off_policy=True).parts["actor_infer"]
    assert (ahead.load_s, ahead.offload_s) == (pytest.approx(2 * 0.3 - 0.1), 0.4)  # it leaves for both phases
    assert ppo["critic"].table.seconds(1, 32) == pytest.approx(0.64 + 0.32 + 2 * 0.5)


def test_answers_are_as_long_as_the_plan_says() -> None:
    assert set(answer_lengths(job())) == {10}
    spread = answer_lengths(job(plan={"prompt_tokens": 1.0, "answer_tokens": 4.0, "answer_spread": 1.0}))
    assert (min(spread), max(spread)) == (1, 10)
    assert sorted(spread)[16] == pytest.approx(4, abs=0.5)


def test_on_policy_parts_take_turns_on_all_devices(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0})
    chosen = choose(spec, [4, 5, 6, 7], tmp_path)
    assert chosen.planned.best.mode is Mode.COLLOCATED
    # 8 × 10 of prompts, ten steps and weights that come back; 8 rows of 20 tokens; and what leaving takes
    assert chosen.planned.best.seconds == pytest.approx(0.08 + 1 + 0.1 + 0.64 + 0.5 + 0.2 + 0.2)
    clusters = chosen.spec.clusters
    assert (clusters.actor_train.gpus, clusters.actor_infer.gpus) == (4, 4)  # anywhere, as long as it is the same
    assert chosen.line == (
        "job: plan: collocated: actor_infer on 4 → actor_train on 4; 2.72 s a step, by the declared speed"
    )
    again = JobSpec.model_validate_json(json.dumps(chosen.spec.model_dump(mode="json")))
    assert again == chosen.spec  # as the run folder keeps it
    assert chosen.job.plan is not None
    assert unplanned(chosen.spec, chosen.job.plan.wanted) == spec
    made = json.loads(chosen.job.plan.to_json())
    assert made["chosen"] == "collocated: actor_infer on 4 → actor_train on 4"
    assert made["seconds"].keys() == {"actor_infer", "actor_train"}
    assert chosen.source.endswith("prompts of 10 tokens, answers of 10, the longest 10")


def test_a_cluster_can_be_kept_as_wide_as_it_is(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0})
    kept = choose(spec, range(4), tmp_path, same={"actor_train": 2})
    assert kept.spec.clusters.actor_train.count == 2
    assert kept.planned.best.seconds > choose(spec, range(4), tmp_path).planned.best.seconds


def test_on_policy_devices_of_their_own_spare_the_switching(tmp_path: Path) -> None:
    plan = choose(job(), range(4), tmp_path).planned.best
    assert plan.shape == "(actor_infer on 2 | actor_train on 2, in turn)"
    assert plan.seconds == pytest.approx(0.16 + 1 + 0.32 + 0.5)


def test_a_step_ahead_generation_gets_devices_of_its_own(tmp_path: Path) -> None:
    chosen = choose(job(schedule="ahead"), [4, 5, 6, 7], tmp_path)
    assert chosen.planned.best.mode is Mode.DISAGGREGATED
    clusters = chosen.spec.clusters
    assert clusters.actor_infer.devices is not None
    assert clusters.actor_train.devices is not None
    assert not set(clusters.actor_infer.devices) & set(clusters.actor_train.devices)
    assert set(clusters.actor_infer.devices + clusters.actor_train.devices) <= {4, 5, 6, 7}
    assert chosen.planned.best.shape.endswith("a step ahead)")
    section = chosen.job.plan
    assert section is not None
    assert section.step_s == pytest.approx(max(section.seconds.values()))


def test_a_mode_and_a_number_of_devices_can_be_asked_for(tmp_path: Path) -> None:
    apart = job(plan={"mode": "disaggregated", "gpus": 2, "prompt_tokens": 10.0})
    plan = choose(apart, range(8), tmp_path).planned.best
    assert plan.shape == "(actor_infer on 1 | actor_train on 1, in turn)"
    with pytest.raises(SpecError, match=r"plan\.gpus: asks for 2 devices, and the pool has 1"):
        choose(apart, [0], tmp_path)


def test_only_widths_among_which_batches_divide() -> None:
    assert widths_of(job(), "actor_train", 12) == (1, 2, 4, 8)
    assert widths_of(job(algorithm={"minibatches": 4}), "actor_train", 12) == (1, 2, 4, 8)
    assert widths_of(job(algorithm={"minibatches": 8}), "actor_train", 12) == (1, 2, 4)
    assert widths_of(job(warmup={"steps": 1, "batch_size": 6}), "actor_train", 12) == (1, 2)
    assert widths_of(job(clusters={"actor_train": {"tensor_parallel": 4}}), "actor_train", 12) == (1, 2)
    assert widths_of(job(), "actor_infer", 3) == (1, 2, 3)


def test_without_a_declared_speed_a_job_is_planned_from_its_profile(tmp_path: Path) -> None:
    spec = job(declared_speed=None, plan="auto")
    with pytest.raises(SpecError, match="run `rlix profile job --gpus 2` first"):
        choose(spec, range(2), tmp_path)
    points = tuple(Point(w, 32, 8.0 / w) for w in (1, 2))
    Profile("job", "here", {name: PartProfile(points) for name in ("actor_infer", "actor_train")}).write(
        profile_path(tmp_path, spec)
    )
    assert choose(spec, range(2), tmp_path).planned.best.seconds == pytest.approx(8.0)
    other = job(declared_speed=None, plan="auto", algorithm={"epochs": 2})
    assert profile_path(tmp_path, other) != profile_path(tmp_path, spec)
    assert profile_path(tmp_path, job(seed=3, name="job2", steps=9)) == profile_path(tmp_path, spec)  # nor do these


@pytest.mark.parametrize(
    ("kept", "said"),
    [(None, "job.yaml --gpus 8` first"), ("{", "is not a profile"), ('{"flow": "", "machine": "", "parts": {}, '
      '"transfers": []}', "has no actor_infer, actor_train")],
)  # fmt: skip
def test_a_run_without_tables_to_plan_by_starts_nothing(
    kept: str | None, said: str, tmp_path: Path, rlix_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(declared_speed=None, plan="auto")
    (tmp_path / "job.yaml").write_text(spec.to_yaml())
    if kept is not None:
        path = profile_path(rlix_home, spec)
        path.parent.mkdir(parents=True)
        path.write_text(kept)
    monkeypatch.setattr(run, "_run_to_end", lambda *_: pytest.fail("it was started"))
    ended = CliRunner().invoke(app, ["run", str(tmp_path / "job.yaml"), "--runs-dir", str(tmp_path / "runs")])
    assert (ended.exit_code, said in ended.output) == (2, True), ended.output


def test_a_profile_runs_the_job_itself_on_every_width() -> None:
    spec = job(declared_speed=None, plan="auto", schedule="ahead")
    narrow, wide = trials(spec, 4, [2, 3, 4], [1, 3, 8], 2)  # 32 samples do not divide among three
    assert (narrow.width, wide.width) == (2, 4)
    assert narrow.spec.schedule.options == {"prompts": [8, 1, 3, 8, 1, 3, 8]}
    assert narrow.spec.algorithm.importance_cap == 2.0  # as the job weighs what is older
    assert narrow.spec.steps == 7
    assert {c.gpus for _, c in wide.spec.clusters.items()} == {4}
    assert narrow.spec.plan is None
    with pytest.raises(SpecError, match="runs on none of"):
        trials(spec, 4, [3], [8], 1)


def test_a_profile_is_read_from_what_the_runs_wrote(tmp_path: Path) -> None:
    spans = []
    for step, start in ((0, 0), (1, 10), (2, 20)):
        for device in (0, 1):
            spans += [
                span(device, start, start + 1.5, kind="load", step=step),
                span(device, start + 1.5, start + 5, step=step),
                span(device, start + 5, start + 5.5, kind="offload", step=step),
                span(device, start + 5.5, start + 6, phase="actor_training", kind="load", step=step),
                span(device, start + 6, start + 8 + device / 4, phase="actor_training", step=step),
            ]
    metrics = [{"step": step, "time": 0, "trajectories": 32 / (step or 1), "rollout_s": 5.0} for step in range(3)]
    record = load_run(write_run(tmp_path / "run", events=spans, metrics=metrics))
    found = measured(job(), [(2, record)], "here")
    infer, train = found.parts["actor_infer"], found.parts["actor_train"]
    assert infer.points == (Point(2, 32, 3.5), Point(2, 16, 3.5))  # without the first step, and without loading
    assert (infer.load_s, infer.offload_s) == (1.5, 0.5)
    assert train.points == (Point(2, 32, 2.75), Point(2, 16, 2.75))  # until the slower device is through
    assert (train.load_s, train.offload_s) == (0, 0)


def test_rlix_profile_keeps_the_tables_that_rlix_plan_plans_by(
    tmp_path: Path, rlix_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(declared_speed=None, plan="auto")
    (tmp_path / "job.yaml").write_text(spec.to_yaml())

    def launch(specs: list[JobSpec], folder: Path) -> list[Any]:
        (trial,) = specs
        train, infer = trial.clusters.actor_train.count or 1, trial.clusters.actor_infer.count or 1
        spans = [span(d, step, step + 8 / train, phase="actor_training", step=step)
                 for step in range(trial.steps) for d in range(train)]  # fmt: skip
        rows = [{"step": step, "time": 0, "trajectories": 32, "rollout_s": 4 / infer} for step in range(trial.steps)]
        write_run(folder / trial.name, events=spans, metrics=rows)
        ended = SimpleNamespace(state="finished", error=None)
        return [SimpleNamespace(wait=lambda _: ended, close=lambda: None)]

    monkeypatch.setattr(plans, "launch", launch)
    monkeypatch.setattr(plans, "shared_pool", lambda *_: contextlib.nullcontext(SimpleNamespace(said="a pool")))
    profiled = CliRunner().invoke(app, ["profile", str(tmp_path / "job.yaml"), "--gpus", "2"])
    assert profiled.exit_code == 0, profiled.output
    assert "measured on 1 rank(s)\nmeasured on 2 rank(s)" in profiled.output
    assert profile_path(rlix_home, spec).exists()
    planned = CliRunner().invoke(app, ["plan", str(tmp_path / "job.yaml"), "--gpus", "2"])
    assert "actor_infer on 2 → actor_train on 2\n  6.000 s a step of 32 items" in planned.output, planned.output
    declared = tmp_path / "declared.yaml"
    declared.write_text(job().to_yaml())
    assert CliRunner().invoke(app, ["profile", str(declared)]).exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters": {"actor_train": {"gpus": 2}}}, "clusters.actor_train.gpus: is what the plan decides; remove it"),
        ({"clusters": {"actor_infer": {"devices": [0]}}}, "clusters.actor_infer.devices: is what the plan decides"),
        ({"plan": "auto"}, "plan.prompt_tokens: is missing: a plan from declared_speed"),
        ({"plan": "fastest"}, "auto"),
        ({"plan": None}, "or have the job planned: 'plan: auto'"),
        ({"pipeline": "collections:Counter"}, "plan: is for jobs that train one policy"),
        ({"source": {"environment": "digit_lookup"}}, "plan.answer_tokens: is missing"),
    ],
)
def test_what_does_not_go_with_a_plan(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        job(**changes)


def test_going_on_with_a_plan_that_is_still_to_be_made_changes_no_clusters(tmp_path: Path) -> None:
    ran = choose(job(), range(4), tmp_path).spec
    assert spec_changes(ran, job()) == []
    assert {c.field for c in spec_changes(ran, choose(job(), range(2), tmp_path).spec)} >= {"clusters.actor_train.gpus"}
    assert all(not change.refused for change in spec_changes(ran, choose(job(), range(2), tmp_path).spec))


def test_rlix_plan_explains_a_job(tmp_path: Path, rlix_home: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(unplanned(job()).to_yaml())
    assert load_job(file) == job()
    shown = CliRunner().invoke(app, ["plan", str(file), "--gpus", "4"])
    assert shown.exit_code == 0, shown.output
    assert "disaggregated: (actor_infer on 2 | actor_train on 2, in turn)" in shown.output
    assert "runner-up" in shown.output
    assert "so parts only take turns" in shown.output
    assert "with `schedule: ahead`, samples up to a step old, it would be" in shown.output
    checked = CliRunner().invoke(app, ["check", str(file), "--gpus", "4", "--memory", "80"])
    assert checked.exit_code == 0, checked.output
    assert "job: plan: disaggregated" in checked.output
    assert "actor_training" in checked.output
    found = CliRunner().invoke(
        app, ["check", str(file), "--gpus", "4", "--memory", "80", "--set", "name=mine", "--json"]
    )
    answer = CheckAnswer.model_validate_json(found.stdout)
    assert (answer.memory, [job.name for job in answer.jobs]) == (80 * 2**30, ["mine"])
    assert all(phase.total == sum(phase.parts.values()) for phase in answer.jobs[0].phases)
    plan = PlanAnswer.model_validate_json(CliRunner().invoke(app, ["plan", str(file), "--gpus", "4", "--json"]).stdout)
    assert (plan.mode, plan.seconds) == ("disaggregated", min(plan.modes.values()))
    wrong = CliRunner().invoke(app, ["plan", str(file), "--mode", "fast"])
    assert wrong.exit_code == 2
