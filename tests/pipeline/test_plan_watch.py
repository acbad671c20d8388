"""A planned job whose steps take another time than planned: what is noticed, and what it goes over to."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlix.pipeline.jobs.launch import planned
from rlix.pipeline.planning.choose import choose
from rlix.pipeline.planning.made import PlannedJob
from rlix.pipeline.planning.watch import PlanWatch
from rlix.protocol.messages import Device, DeviceKind, Lease, LeaseRecord
from rlix.protocol.types import Phase
from tests.pipeline.test_planning import SPEED, job

DEVICES = {i: Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(4)}


class Run:
    """A job by its plan, on a clock of its own; its rollout has `devices` from the start."""

    def __init__(self, job: PlannedJob, devices: int, *, may_switch: bool = True, start_s: float = 10.0) -> None:
        self.watch = PlanWatch(job, 100.0, may_switch=may_switch)
        self.now = 100.0 + start_s
        self.lease("granted", range(devices), 1)

    def lease(self, event: Any, devices: Any, epoch: int) -> None:
        lease = Lease(epoch, "job", "actor_infer", Phase.ROLLOUT, tuple(devices))
        self.watch.lease(LeaseRecord(epoch, event, lease, self.now))

    def steps(self, count: int, step_s: float, train_s: float, rollout_s: float = 0.0, **more: float) -> list[str]:
        said = []
        for _ in range(count):
            self.now += step_s
            self.watch.phase("actor_train", train_s)
            said.append(self.watch.step({"step_s": step_s, "rollout_s": rollout_s, **more}, self.now))
        return said


def asking(planned: PlannedJob, switch: str) -> PlannedJob:
    """The same, had its user said `switch`."""
    assert planned.plan is not None
    return replace(
        planned, plan=replace(planned.plan, wanted=planned.plan.wanted.model_copy(update={"switch": switch}))
    )


def test_times_that_drift_are_noticed_and_kept_for_the_next_plan(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0})
    run = Run(choose(spec, range(4), tmp_path).job, 4)
    assert run.steps(5, 2.9, 1.2, 1.4) == [""] * 5  # planned were 2.72 s: 1.14 of training, 1.38 until generated
    said = run.steps(5, 4.6, 1.14, 3.38)
    (drifted,) = filter(None, said)
    assert said[2] == drifted
    assert drifted == "steps take 4.6 s, planned were 2.72 s: actor_infer 2.45 times its time"
    assert run.watch.anew(tmp_path, DEVICES, 100, tmp_path) is None  # it is still the fastest
    kept = json.loads((tmp_path / "measured.json").read_text())["times"]
    assert kept["actor_infer"] == [4, pytest.approx(1.08 * 3.38 / 1.38)]
    again = choose(spec, range(4), tmp_path, measured=tmp_path)
    assert again.profile.parts["actor_infer"].table.seconds(4, 32) == pytest.approx(kept["actor_infer"][1])
    assert planned(PlannedJob(spec), range(4), tmp_path, tmp_path) == again.job
    assert planned(PlannedJob(spec), range(4), tmp_path, None) != again.job
    assert run.steps(5, 4.6, 1.14, 3.38) == [""] * 5  # said once


def test_a_rollout_whose_devices_others_had_says_nothing_about_the_plan(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0})
    run = Run(choose(spec, range(4), tmp_path).job, 2)
    assert "none of the parts" in run.steps(3, 4.6, 1.14, 3.38)[2]
    run.lease("granted", (2, 3), 2)  # from here on it has all of them
    assert "actor_infer 2.45 times" in run.steps(3, 4.6, 1.14, 3.38)[2]
    late = Run(choose(spec, range(4), tmp_path).job, 4)
    late.lease("released", (0, 1, 2, 3), 1)
    late.now += 1.0
    late.lease("granted", (0, 1, 2, 3), 2)
    late.now -= 1.0
    assert late.steps(1, 4.6, 1.14, 3.38) == [""]  # a second of 3.38 without any
    said = late.steps(3, 4.6, 1.14, 3.38)
    assert [bool(word) for word in said] == [False, False, True]


def test_it_goes_over_to_a_better_plan_that_pays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = job(schedule="ahead", declared_speed={**SPEED, "trained_token_ms": 8.0})
    spec = spec.model_copy(update={"plan": spec.plan and spec.plan.model_copy(update={"switch": "any"})})
    first = choose(spec, range(4), tmp_path)
    slow_s = 3 * first.planned.best.seconds

    def drifted(planned: PlannedJob, **options: Any) -> Run:
        run = Run(planned, 4, **options)
        assert "actor_train 3.00 times its time" in run.steps(3, slow_s, slow_s)[2]
        return run

    better = drifted(first.job).watch.anew(tmp_path, DEVICES, 100, tmp_path)
    assert better is not None
    assert better.plan is not None
    assert better.plan.chosen == "collocated: actor_infer on 4 → actor_train on 4"
    assert (better.spec.clusters.actor_train.gpus, better.spec.clusters.actor_infer.gpus) == (4, 4)
    assert "job: goes on by another plan, collocated: actor_infer on 4 → actor_train on 4" in caplog.text
    told = "by these times another plan would be collocated: actor_infer on 4 → actor_train on 4"
    for options, left in (
        ({}, 1),  # too late for that
        ({"start_s": 10000.0}, 100),
        ({"may_switch": False}, 100),
    ):
        caplog.clear()
        assert drifted(first.job, **options).watch.anew(tmp_path, DEVICES, left, tmp_path) is None
        assert told in caplog.text
    caplog.clear()  # as `exact`: only what leaves training on as many devices, and nothing does
    assert drifted(asking(first.job, "exact")).watch.anew(tmp_path, DEVICES, 100, tmp_path) is None
    assert told in caplog.text


@pytest.mark.parametrize("changes", [{}, {"schedule": "mine.py:Mine"}, {"source": "mine.py:Mine"}, {"vllm": True}])
def test_exactly_goes_over_only_who_learns_the_same_then(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0})
    chosen = choose(spec, range(4), tmp_path, same={"actor_infer": 1, "actor_train": 4})  # as if that had been best
    spec, plan = chosen.spec, chosen.job.plan
    assert plan is not None
    assert (spec.clusters.actor_infer.count, spec.clusters.actor_train.count) == (1, 4)
    rollout = spec.rollout.model_copy(update={"executor": "vllm"} if changes.get("vllm") else {})
    named = {name: type(getattr(spec, name))(name=value) for name, value in changes.items() if name != "vllm"}
    run = Run(PlannedJob(spec.model_copy(update={"rollout": rollout, **named}), plan), 1)
    seconds = plan.seconds
    assert any(run.steps(3, 3 * plan.step_s, seconds["actor_train"], 3 * seconds["actor_infer"]))
    found = run.watch.anew(tmp_path, DEVICES, 1000, tmp_path)
    assert (found is not None) == (not changes)
    if found is not None:
        assert (found.spec.clusters.actor_infer.count, found.spec.clusters.actor_train.count) == (4, 4)


def test_what_parts_beside_each_other_take_does_not_add_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = job(schedule="ahead", declared_speed={**SPEED, "trained_token_ms": 8.0})
    planned = asking(choose(spec, range(4), tmp_path).job, "any")
    section = planned.plan
    assert section is not None
    assert section.chosen == "disaggregated: (actor_infer on 1 | actor_train on 2, a step ahead)"
    assert section.seconds == {"actor_infer": pytest.approx(1.42), "actor_train": pytest.approx(3.72)}
    run = Run(planned, 1)
    assert "actor_infer 2.71 times" in run.steps(3, 3.85, 3.72, rollout_wait_s=0.3)[2]
    assert run.watch.anew(tmp_path, DEVICES, 1000, tmp_path) is None
    assert "none of the parts" in run.steps(3, 12.0, 3.72)[2]  # others had the trainer's devices
    assert run.watch.anew(tmp_path, DEVICES, 1000, tmp_path) is None
    assert "another plan" not in caplog.text


def test_a_plan_that_was_left_is_not_gone_back_to(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0})
    planned = choose(spec, range(4), tmp_path, same={"actor_infer": 1, "actor_train": 4}).job
    assert planned.plan is not None
    times, first = planned.plan.seconds, planned.plan.chosen

    def drifted() -> PlannedJob | None:
        run = Run(planned, 1)
        assert any(run.steps(3, 9.0, times["actor_train"], 3 * times["actor_infer"]))
        return run.watch.anew(tmp_path, DEVICES, 1000, tmp_path)

    better = drifted()
    assert better is not None
    assert better.plan is not None
    assert json.loads((tmp_path / "measured.json").read_text())["left"] == [first]
    (tmp_path / "measured.json").write_text(json.dumps({"left": [better.plan.chosen]}))  # it came from there
    assert drifted() is None
    assert json.loads((tmp_path / "measured.json").read_text())["left"] == [better.plan.chosen]


def test_generation_that_is_waited_for_drifts_too(tmp_path: Path) -> None:
    spec = job(schedule="ahead", declared_speed={**SPEED, "trained_token_ms": 8.0})
    chosen = choose(spec, range(4), tmp_path)
    plan = chosen.job.plan
    assert plan is not None
    step_s = 2 * plan.seconds["actor_infer"]
    run = Run(chosen.job, chosen.spec.clusters.actor_infer.count or 0)
    said = run.steps(3, step_s, plan.seconds["actor_train"], rollout_wait_s=0.3 * step_s)
    assert "actor_infer 2.00 times its time" in said[2]
    idle = Run(chosen.job, chosen.spec.clusters.actor_infer.count or 0)
    assert "actor_infer" not in idle.steps(3, step_s, plan.seconds["actor_train"], rollout_wait_s=0.0)[2]


def test_waiting_for_other_jobs_is_no_reason_for_another_plan(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0}, plan={"prompt_tokens": 10.0, "switch": "any"})
    run = Run(choose(spec, range(4), tmp_path).job, 4)
    assert "none of the parts" in run.steps(3, 20.0, 1.14, 1.38)[2]
    assert run.watch.anew(tmp_path, DEVICES, 1000, tmp_path) is None


def test_a_job_that_was_not_planned_is_not_watched() -> None:
    run = Run(PlannedJob(job(plan=None, clusters={"actor_train": {"gpus": 1}})), 4)
    assert run.steps(5, 100, 100, 100) == [""] * 5
