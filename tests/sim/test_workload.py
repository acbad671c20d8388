"""Workload files: the shipped ones load, and a mistake is named with its place and the fix."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.protocol.errors import SpecError
from rlix.sim.fluid import Curve
from rlix.sim.jobs import draw_jobs
from rlix.sim.multi_turn import MultiTurn
from rlix.sim.workload import Workload, load_workload, shipped_names

GOOD: dict[str, Any] = {
    "name": "small",
    "pool": {"gpus": 8, "gpus_per_node": 8},
    "jobs": [
        {
            "name": "a",
            "count": 2,
            "steps": 2,
            "rollout": {"trajectories": 32, "lengths": {"median": 400, "sigma": 0.8, "cap": 2048}},
            "gangs": [{"phase": "actor_training", "gpus": 4, "seconds": 20}],
        }
    ],
}


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_workloads_load_and_say_what_they_are(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    assert workload.description
    assert len(draw_jobs(workload, 0)) == workload.job_count


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["pool", "gpus"], 0, ": pool.gpus: must be greater than or equal to 1, not 0"),
        (["pool", "gpus"], "8", ": pool.gpus: must be a valid integer, not '8'"),
        (["pool", "gpu"], 8, ": pool.gpu: unknown key; did you mean 'gpus'?"),
        (["jobs", 0, "rollout", "lengths", "sigma"], -1, ": jobs.0.rollout.lengths.sigma: must be greater"),
        (["jobs", 0, "rollout", "lengths", "median"], float("inf"), ".lengths.median: must be a finite number"),
        (["jobs", 0, "rollout", "lengths", "cap"], 300, ".rollout.lengths: median is 400 and cap 300; give a cap of"),
        (["jobs", 0, "gangs", 0, "gpus"], 16, ": jobs.0.gangs.0.gpus: is 16, and the pool has 8"),
        (["jobs", 0, "gangs", 0, "phase"], "actor_trainin", "not 'actor_trainin'; did you mean 'actor_training'?"),
        (["jobs", 0, "rollout", "tensor_parallel"], 3, ".rollout.tensor_parallel: 3 does not divide 8 GPUs"),
        (["jobs", 0, "rollout", "gpus"], 12, ": jobs.0.rollout.gpus: is 12, and the pool has 8"),
        (
            ["jobs", 0, "rollout", "environment"],
            {"reset_p99_s": 4.0},
            "reset_p99_s is 4 and reset_p50_s 0; give",
        ),
        (["jobs"], [], ": jobs: must have at least 1, not []"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, path: list[Any], value: Any, expected: str) -> None:
    data = copy.deepcopy(GOOD)
    target: Any = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    file = tmp_path / "w.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError) as caught:
        load_workload(file)
    (line,) = str(caught.value).splitlines()
    assert expected in line
    assert re.match(rf"{file}:\d+: ", line)


def test_files_that_are_no_workload(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="balanced"):
        load_workload("no-such-workload")
    file = tmp_path / "w.yaml"
    for text, message in (
        ("[1, 2", r"w\.yaml:1:\d: not valid YAML"),
        ("- a list", r"w\.yaml: is a list; a workload is a mapping of name, pool and jobs"),
        ("name: a\nname: b\n", r"w\.yaml:2: name: given twice"),
        (yaml.safe_dump(GOOD).replace("gpus: 8", "gpus: 8e-4", 1), r"w\.yaml:\d+: .*not 0\.0008"),
    ):
        file.write_text(text)
        with pytest.raises(SpecError, match=message):
            load_workload(file)
    two = [{**GOOD["jobs"][0], "name": name} for name in ("a", "a")]
    file.write_text(yaml.safe_dump({**GOOD, "jobs": two}))
    with pytest.raises(SpecError, match=r"w\.yaml:\d+: jobs\.1\.name: 'a' is also the name of jobs\.0; rename one"):
        load_workload(file)


def test_resizing_checks_again() -> None:
    with pytest.raises(SpecError, match="the pool has 2"):
        Workload.model_validate(GOOD).resized(2)


@given(st.integers(0, 10_000), st.floats(0.35, 1.3), st.floats(0.0, 0.3))
@settings(max_examples=25, deadline=None)
def test_drawn_jobs_depend_on_the_seed_alone_and_respect_the_cap(seed: int, sigma: float, cap_share: float) -> None:
    data = copy.deepcopy(GOOD)
    data["jobs"][0]["rollout"]["lengths"] = {"median": 400, "sigma": sigma, "cap": 2048, "cap_share": cap_share}
    workload = Workload.model_validate(data)
    first, again = draw_jobs(workload, seed), draw_jobs(workload, seed)
    assert first == again
    for one, other in zip(first, again, strict=True):
        curve, same = one.step(1).work, other.step(1).work
        assert isinstance(curve, Curve)
        assert isinstance(same, Curve)
        assert np.array_equal(curve.depth, same.depth)
        assert curve.depth[1] >= 1
        assert curve.depth[-1] <= 2048
        assert curve.trajectories == 32


def test_lengths_have_the_declared_shape() -> None:
    data = copy.deepcopy(GOOD)
    data["jobs"][0]["rollout"] = {
        "trajectories": 20_000,
        "lengths": {"median": 400, "sigma": 0.8, "cap": 100_000, "cap_share": 0.0},
    }
    job = draw_jobs(Workload.model_validate(data), 0)[0]
    curve = job.step(0).work
    assert isinstance(curve, Curve)
    half = curve.depth[np.searchsorted([-curve.alive(d) for d in curve.depth], -10_000)]
    assert half == pytest.approx(400, rel=0.06)
    assert curve.tokens[-1] / 20_000 == pytest.approx(400 * np.exp(0.8**2 / 2), rel=0.06)


def test_turns_and_waits_are_each_trajectorys_own_and_have_the_declared_shape() -> None:
    """Turns of 100 tokens on average; calls of 0.16 s at the median; a tenth fails and begins again."""
    data = copy.deepcopy(GOOD)
    waits = {"latency_p50_s": 0.16, "latency_p99_s": 2.7, "reset_p50_s": 5.0, "reset_p99_s": 20.0}
    data["jobs"][0]["rollout"] |= {
        "trajectories": 2000,
        "environment": {"tokens_per_turn": 100, "failure_rate": 0.1} | waits,
    }
    job, again = (draw_jobs(Workload.model_validate(data), 0)[0] for _ in range(2))
    work, same = job.step(0).work, again.step(0).work
    assert isinstance(work, MultiTurn)
    assert isinstance(same, MultiTurn)
    drawn = work.trajectories
    assert all(np.array_equal(a.waits_s, b.waits_s) for a, b in zip(drawn, same.trajectories, strict=True))
    assert all(t.tokens.min() >= 1 and np.ptp(t.tokens[t.again :]) <= 1 for t in drawn)
    assert sum(t.tokens.sum() for t in drawn) / sum(len(t.tokens) for t in drawn) == pytest.approx(100, rel=0.05)
    calls = np.concatenate([t.waits_s[t.again + 1 :] for t in drawn])
    assert np.percentile(calls, [50, 99]) == pytest.approx([0.16, 2.7], rel=0.2)
    assert np.median([t.waits_s[0] for t in drawn]) == pytest.approx(5.0, rel=0.1)
    failed = [t for t in drawn if t.again]
    assert 0.07 < len(failed) / 2000 < 0.13
    assert all(t.waits_s[t.again] > 0.5 for t in failed)  # another sandbox
    assert job.step(0).useful == pytest.approx(1 / (1 + 0.1 * 0.5), rel=0.05)


def test_gangs_that_may_move_name_every_other_block_from_the_nearest_on() -> None:
    workload = load_workload("one-gang-block").moving()
    assert workload.name == "one-gang-block-moving"
    train = draw_jobs(workload, 0)[0].registration.cluster("actor_train")
    assert train.devices == tuple(range(8))
    assert [block[0] for block in train.alternatives] == [8, 16, 24]
    assert {len(block) for block in train.alternatives} == {8}
    assert not draw_jobs(load_workload("one-gang-block"), 0)[0].registration.cluster("actor_train").alternatives
