"""Whole jobs on real Ray, real models and real leases."""

import ast
import importlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
from ray.exceptions import RayActorError

import rlix
from rlix.pipeline.jobs import job_coordinator
from rlix.pipeline.jobs import launch as launching
from rlix.pipeline.jobs.job_coordinator import JobCoordinator
from rlix.pipeline.jobs.launch import split_devices
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.spec.clusters import ReplicasSpec
from rlix.pipeline.spec.job import load_job
from rlix.pipeline.spec.model import TinyModel
from rlix.protocol.errors import SpecError
from tests.pipeline.training_jobs import STEPS, Jobs, closing_jobs, learnt, rows, small, until_nothing_is_held

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_pipeline.py"


@pytest.fixture
def jobs(ray_session: Any) -> Iterator[Jobs]:
    with closing_jobs() as made:
        yield made


@pytest.mark.ray
def test_a_failing_job_reports_why_and_the_example_of_a_custom_pipeline_runs_beside_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    broken = small("sort_digits", name="broken", pipeline={"name": "tests.pipeline.broken_pipeline:BrokenPipeline"})
    custom = small(str(EXAMPLE.with_suffix(".yaml")))
    stillborn = small(name="stillborn", pipeline={"name": "tests.pipeline.stillborn_pipeline:Pipeline"})
    started = jobs.start(broken, custom, stillborn, runs=tmp_path)
    failed, fine, dead = (handle.wait(300) for handle in started)
    assert (failed.state, dead.state) == ("failed", "failed")
    assert re.fullmatch(r"RuntimeError: no luck today \(.*broken_pipeline\.py:13\)", failed.error or "")
    assert (tmp_path / "broken" / "output.log").read_text() == "imported\n"
    early = tmp_path / "stillborn.output.log"
    why = r"SpecError: module .* cannot be imported: LookupError: no data \(.*stillborn_pipeline\.py:6\)"
    assert re.fullmatch(rf"{why}\nwhat its code printed is in {early}", dead.error or ""), dead.error
    assert early.read_text().startswith("looking for my data\n")  # then comes what Ray says
    assert not list(tmp_path.glob("b*.log"))
    assert fine.state == "finished", fine
    metrics = rows(tmp_path / "best_of_group" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(STEPS))
    assert all(m["trajectories"] == custom.trajectories_per_step and m["grad_norm"] > 0 for m in metrics)


def test_a_few_coordinators_are_started_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sixty that import at the same time are a machine that does nothing else for minutes."""
    starting, most = [], []

    def create(config: JobConfig, _: object) -> MagicMock:
        most.append(len(starting))
        starting.append(config.spec.name)
        return MagicMock(asked=lambda: config.spec.name, pipeline_id=config.spec.name)

    def wait(asked: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        for name in asked[:num_returns]:
            starting.remove(name)
        return asked[:num_returns], asked[num_returns:]

    monkeypatch.setattr(launching, "ray", MagicMock(wait=wait))
    for name in ("check_jobs", "check_importable", "prefork", "check_hosts", "check_free", "take_back"):
        monkeypatch.setattr(launching, name, MagicMock(return_value=None))
    monkeypatch.setattr(launching, "get", MagicMock(return_value=SimpleNamespace(devices=(), drained="", lent=1)))
    monkeypatch.setattr(launching, "_create", create)
    handles = launching.launch([small(name=f"job{number}") for number in range(12)], tmp_path)
    assert (len(handles), max(most)) == (12, launching.AT_ONCE - 1)


def test_the_example_of_a_custom_pipeline_is_short_and_uses_public_names_only() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 80
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlix"):
            public = importlib.import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(public), f"{node.module} does not export all of these"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rlix":
            assert node.attr in rlix.__all__


def test_split_gives_each_job_a_part_of_its_own() -> None:
    sort, copy = split_devices([load_job("sort_digits"), load_job("copy_digits")], [0, 1, 2, 3])
    assert [c.devices for _, c in sort.clusters.items()] == [(0, 1), (0, 1)]
    assert [c.devices for _, c in copy.clusters.items()] == [(2, 3), (2, 3)]


def test_split_gives_parts_of_a_pool_with_gaps() -> None:
    job = load_job("sort_digits")
    kept = job.clusters.model_copy(update={"actor_infer": ReplicasSpec(tensor_parallel=2)})
    job = job.model_copy(
        update={"clusters": kept, "algorithm": job.algorithm.model_copy(update={"options": {"kl_coefficient": 0.1}})}
    )
    _, second = split_devices([job, job], [2, 3, 5, 7, 11, 13, 17])
    assert {name: cluster.devices for name, cluster in second.clusters_in_use.items()} == {
        "actor_train": (7, 11),
        "actor_infer": (7, 11),  # one whole bundle of two
        "reference": (7, 11),
    }


def test_split_refuses_a_bundle_larger_than_a_part() -> None:
    job = load_job("sort_digits")
    wide = ReplicasSpec(devices=(0, 1, 2, 3), tensor_parallel=4)
    job = job.model_copy(update={"clusters": job.clusters.model_copy(update={"actor_infer": wide})})
    with pytest.raises(SpecError, match=r"actor_infer needs 4 devices, .*gives each job 2; .* lower tensor_parallel"):
        split_devices([job, job], range(4))


@pytest.mark.ray
def test_a_coordinator_whose_launcher_died_before_it_said_start_ends(ray_session: Any, tmp_path: Path) -> None:
    config = JobConfig(small(), tmp_path)
    options = {"name": "rlix:coordinator:ft_unstarted", "lifetime": "detached", "num_cpus": 0}
    coordinator = ray.remote(JobCoordinator).options(**options).remote("ft_unstarted", config, look_every_s=0.1)
    with pytest.raises(RayActorError):
        ray.get(coordinator.ended.remote(), timeout=300)


def test_a_coordinator_that_was_started_meanwhile_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline that it asked about has ended since, and the job goes on as another one."""
    started, asked, killed = threading.Event(), list[str](), list[Any]()

    def is_registered(pipeline_id: str) -> bool:
        asked.append(pipeline_id)
        started.set()
        return False

    monkeypatch.setattr(job_coordinator, "_is_registered", is_registered)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="it"))
    coordinator: Any = SimpleNamespace(_started=started, _pipeline_id="ft_1")
    JobCoordinator._end_unstarted(coordinator, 0.0)
    assert (asked, killed) == (["ft_1"], [])


@pytest.mark.ray
def test_a_job_goes_on_by_another_plan_or_back_by_its_own_when_that_cannot_be(jobs: Jobs, tmp_path: Path) -> None:
    clusters = {"actor_train": {"gpus": 1}, "actor_infer": {"gpus": 1}}
    spec = small(pipeline="tests.pipeline.switching_pipeline:SwitchingPipeline", name="switching", clusters=clusters)
    (job,) = jobs.start(spec, runs=tmp_path)
    first = job.pipeline_id
    jobs.finish(job)
    metrics = rows(tmp_path / "switching" / "metrics.jsonl")
    assert [(m["step"], m["devices"]) for m in metrics] == [(0, 1), (1, 2), (2, 2), (3, 2)]
    said = [e["event"] for e in rows(tmp_path / "switching" / "events.jsonl") if e["type"] == "job"]
    left = ["started", "first_step", "stopped"]
    assert said == [*left * 3, "started", "failed", "started", "first_step", "finished"]
    made = json.loads((tmp_path / "switching" / "plan.json").read_text())
    assert (made["chosen"], made["wanted"]["switch"]) == ("on 2", "never")
    assert "plan" not in (tmp_path / "switching" / "spec.yaml").read_text()
    assert job.pipeline_id != first
    until_nothing_is_held()


@pytest.mark.ray
@pytest.mark.slow
def test_a_teacher_in_two_shards_teaches_what_a_whole_one_does(jobs: Jobs, tmp_path: Path) -> None:
    """It is larger than what learns, and by default in as many shards as it has devices."""
    like = small().model
    assert isinstance(like, TinyModel)
    teacher = write_tiny_model(like.model_copy(update={"hidden_size": 96, "layers": 3}), tmp_path / "teacher", seed=3)
    algorithm = {"name": "distill", "options": {"teacher": str(teacher)}}
    clusters = {"actor_train": {"devices": (0,)}, "actor_infer": {"devices": (0, 1)}}
    specs = [
        small(name=name, algorithm=algorithm, steps=2, clusters={**clusters, "reference": {"devices": devices}})
        for name, devices in (("whole", (2,)), ("sharded", (2, 3)))
    ]
    assert specs[1].clusters_in_use["reference"].copy_of(2) == 2
    jobs.finish(*jobs.start(*specs, runs=tmp_path))
    whole, sharded = (learnt(tmp_path / spec.name) for spec in specs)
    assert whole[0]["trajectories_digest"] == sharded[0]["trajectories_digest"]
    assert whole[0]["grad_norm"] > 0
    assert sharded[0] == pytest.approx(whole[0], rel=1e-4, abs=1e-6)
