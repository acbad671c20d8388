"""A planned job whose steps take another time than planned: what is noticed, and what it goes over to."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rlix.pipeline.planning.choose import choose
from rlix.pipeline.planning.watch import PlanWatch
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.messages import Device, DeviceKind, Lease, LeaseRecord
from rlix.protocol.types import Phase
from tests.pipeline.test_planning import SPEED, job

DEVICES = {i: Device(i, "node", "127.0.0.1", i, DeviceKind.CPU) for i in range(4)}


class Run:
    """A job by its plan, on a clock of its own; its rollout has `devices` from the start."""

    def __init__(self, spec: JobSpec, devices: int, *, may_switch: bool = True, start_s: float = 10.0) -> None:
        self.watch = PlanWatch(spec, 100.0, may_switch=may_switch)
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


def test_times_that_drift_are_noticed_and_kept_for_the_next_plan(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0})
    run = Run(choose(spec, range(4), tmp_path).spec, 4)
    assert run.steps(5, 2.9, 1.2, 1.4) == [""] * 5  # planned were 2.72 s: 1.14 of training, 1.38 until generated
    said = run.steps(5, 4.6, 1.14, 3.38)
    (drifted,) = filter(None, said)
    assert said[2] == drifted
    assert drifted == "steps take 4.6 s, planned were 2.72 s: actor_infer 2.45 times its time"
    assert run.watch.anew(tmp_path, DEVICES, 100, tmp_path) is None  # it is still the fastest
    kept = json.loads((tmp_path / "measured.json").read_text())
    assert kept["actor_infer"] == [4, pytest.approx(1.08 * 3.38 / 1.38)]
    again = choose(spec, range(4), tmp_path, measured=tmp_path)
    assert again.profile.parts["actor_infer"].table.seconds(4, 32) == pytest.approx(kept["actor_infer"][1])
    assert run.steps(5, 4.6, 1.14, 3.38) == [""] * 5  # said once


def test_a_rollout_whose_devices_others_had_says_nothing_about_the_plan(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0})
    run = Run(choose(spec, range(4), tmp_path).spec, 2)
    assert "none of the parts" in run.steps(3, 4.6, 1.14, 3.38)[2]
    run.lease("granted", (2, 3), 2)  # from here on it has all of them
    assert "actor_infer 2.45 times" in run.steps(3, 4.6, 1.14, 3.38)[2]
    late = Run(choose(spec, range(4), tmp_path).spec, 4)
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

    def drifted(planned: JobSpec, **options: Any) -> Run:
        run = Run(planned, 4, **options)
        assert "actor_train 3.00 times its time" in run.steps(3, slow_s, slow_s)[2]
        return run

    better = drifted(first.spec).watch.anew(tmp_path, DEVICES, 100, tmp_path)
    assert better is not None
    assert better.plan is not None
    assert better.plan.chosen == "collocated: actor_infer on 4 → actor_train on 4"
    assert (better.clusters.actor_train.gpus, better.clusters.actor_infer.gpus) == (4, 4)
    assert "job: goes on by another plan, collocated: actor_infer on 4 → actor_train on 4" in caplog.text
    told = "by these times another plan would be collocated: actor_infer on 4 → actor_train on 4"
    for options, left in (
        ({}, 1),  # too late for that
        ({"start_s": 10000.0}, 100),
        ({"may_switch": False}, 100),
    ):
        caplog.clear()
        assert drifted(first.spec, **options).watch.anew(tmp_path, DEVICES, left, tmp_path) is None
        assert told in caplog.text
    caplog.clear()  # as `exact`: only what leaves training on as many devices, and nothing does
    section = first.spec.plan and first.spec.plan.model_copy(update={"switch": "exact"})
    exact = first.spec.model_copy(update={"plan": section})
    assert drifted(exact).watch.anew(tmp_path, DEVICES, 100, tmp_path) is None
    assert told in caplog.text


def test_generation_that_is_waited_for_drifts_too(tmp_path: Path) -> None:
    spec = job(schedule="ahead", declared_speed={**SPEED, "trained_token_ms": 8.0})
    chosen = choose(spec, range(4), tmp_path)
    plan = chosen.spec.plan
    assert plan is not None
    step_s = 2 * plan.seconds["actor_infer"]
    run = Run(chosen.spec, chosen.spec.clusters.actor_infer.count or 0)
    said = run.steps(3, step_s, plan.seconds["actor_train"], rollout_wait_s=0.3 * step_s)
    assert "actor_infer 2.00 times its time" in said[2]
    idle = Run(chosen.spec, chosen.spec.clusters.actor_infer.count or 0)
    assert "actor_infer" not in idle.steps(3, step_s, plan.seconds["actor_train"], rollout_wait_s=0.0)[2]


def test_waiting_for_other_jobs_is_no_reason_for_another_plan(tmp_path: Path) -> None:
    spec = job(declared_speed={**SPEED, "trained_token_ms": 4.0}, plan={"prompt_tokens": 10.0, "switch": "any"})
    run = Run(choose(spec, range(4), tmp_path).spec, 4)
    assert "none of the parts" in run.steps(3, 20.0, 1.14, 1.38)[2]
    assert run.watch.anew(tmp_path, DEVICES, 1000, tmp_path) is None


def test_a_job_that_was_not_planned_is_not_watched() -> None:
    run = Run(job(plan=None, clusters={"actor_train": {"gpus": 1}}), 4)
    assert run.steps(5, 100, 100, 100) == [""] * 5
