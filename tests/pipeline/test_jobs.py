"""Whole jobs on real Ray, real models and real leases."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlix.pipeline.launch import JobHandle, launch, split_devices, wait_all
from rlix.pipeline.run_folder import list_checkpoints
from rlix.pipeline.spec import ClusterSpec, JobSpec, load_job
from rlix.protocol.errors import SpecError
from tests.pipeline.training_jobs import leases_left

STEPS = 4


def small_job(example: str, **changes: Any) -> JobSpec:
    """A shipped example, cut down to a few small steps."""
    spec = load_job(example)
    warmup = spec.warmup.model_copy(update={"steps": 5}) if spec.warmup else None
    rollout = spec.rollout.model_copy(update={"prompts_per_step": 8, "samples_per_prompt": 4})
    checkpoint = spec.checkpoint.model_copy(update={"every": 2})
    update = {"steps": STEPS, "warmup": warmup, "rollout": rollout, "checkpoint": checkpoint, **changes}
    return spec.model_copy(update=update)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(ray_session: Any) -> Iterator[Any]:
    """Launch jobs; whatever happens, they are closed afterwards."""
    handles: list[JobHandle] = []

    def start(specs: list[JobSpec], runs_dir: Path, **options: Any) -> list[JobHandle]:
        handles.extend(launch(specs, runs_dir, **options))
        return handles[-len(specs) :]

    yield start
    for handle in handles:
        handle.close()


@pytest.mark.ray
def test_two_jobs_share_four_devices(run: Any, tmp_path: Path) -> None:
    specs = [small_job("sort_digits"), small_job("copy_digits")]
    statuses = wait_all(run(specs, tmp_path), timeout_s=120)
    assert [(s.state, s.step) for s in statuses] == [("finished", STEPS)] * 2, statuses

    held: dict[str, set[int]] = {}
    for spec in specs:
        folder = tmp_path / spec.name
        metrics = rows(folder / "metrics.jsonl")
        assert [m["step"] for m in metrics] == list(range(STEPS))
        assert all(m["tokens"] > 0 and m["grad_norm"] > 0 for m in metrics)
        leases = [e for e in rows(folder / "events.jsonl") if e["type"] == "lease"]
        rollouts = [e for e in leases if e["event"] == "granted" and e["phase"] == "rollout"]
        held[spec.name] = {device for lease in rollouts for device in lease["devices"]}
        granted = {e["epoch"] for e in leases if e["event"] == "granted"}
        assert {e["epoch"] for e in leases if e["event"] == "released"} <= granted
        assert any(e["event"] == "shrinking" for e in leases), "training must have preempted rollouts"
        assert (folder / "checkpoints" / f"step_{STEPS}" / "model" / "config.json").exists()
    # rollouts of both jobs ran on some of the same devices
    assert held["sort_digits"] & held["copy_digits"]

    assert leases_left() == ()


@pytest.mark.ray
def test_a_resumed_job_does_the_steps_an_unbroken_one_does(run: Any, tmp_path: Path) -> None:
    spec = small_job("sort_digits")
    wait_all(run([spec], tmp_path / "whole"), timeout_s=120)
    wait_all(run([spec.model_copy(update={"steps": 2})], tmp_path / "parts"), timeout_s=120)
    (status,) = wait_all(run([spec], tmp_path / "parts", resume=True), timeout_s=120)
    assert status.state == "finished"

    names = ("step", "reward", "exact", "tokens")
    whole, parts = (
        [[row[name] for name in names] for row in rows(tmp_path / run_dir / spec.name / "metrics.jsonl")]
        for run_dir in ("whole", "parts")
    )
    assert parts == whole


@pytest.mark.ray
def test_a_stopped_job_keeps_a_checkpoint_and_frees_its_devices(run: Any, tmp_path: Path) -> None:
    (handle,) = run([small_job("copy_digits", steps=100_000)], tmp_path)
    while handle.status().step < 1:
        assert handle.status().state in ("starting", "running"), handle.status()
    handle.stop()
    status = handle.wait(timeout_s=60)
    assert status.state == "stopped"
    saved = [step for step, _ in list_checkpoints(tmp_path / "copy_digits" / "checkpoints")]
    assert saved[-1] == status.step


@pytest.mark.ray
def test_a_killed_replica_costs_no_trajectory(run: Any, tmp_path: Path) -> None:
    (handle,) = run([small_job("sort_digits", steps=6)], tmp_path)
    while handle.status().step < 2:
        assert handle.status().state in ("starting", "running"), handle.status()
    namespace = f"pipeline_{handle.pipeline_id}_NS"
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == namespace]
    replica = sorted(name for name in names if "infer" in name)[-1]
    ray.kill(ray.get_actor(replica, namespace=namespace))
    status = handle.wait(timeout_s=120)
    assert status.state == "finished", status
    assert [row["step"] for row in rows(tmp_path / "sort_digits" / "metrics.jsonl")] == list(range(6))


@pytest.mark.ray
def test_a_failing_job_reports_why_and_leaves_the_other_alone(run: Any, tmp_path: Path) -> None:
    broken = small_job("sort_digits", name="broken", pipeline="tests.pipeline.broken_pipeline:BrokenPipeline")
    failed, fine = wait_all(run([broken, small_job("copy_digits")], tmp_path), timeout_s=120)
    assert (failed.state, failed.error) == ("failed", "RuntimeError: no luck today")
    assert fine.state == "finished"


def test_split_gives_each_job_a_part_of_its_own() -> None:
    sort, copy = split_devices([load_job("sort_digits"), load_job("copy_digits")], 4)
    assert [c.devices for _, c in sort.clusters.items()] == [(0, 1), (0, 1)]
    assert [c.devices for _, c in copy.clusters.items()] == [(2, 3), (2, 3)]


def test_split_refuses_a_bundle_larger_than_a_part() -> None:
    job = load_job("sort_digits")
    wide = ClusterSpec(devices=(0, 1, 2, 3), tensor_parallel=4)
    job = job.model_copy(update={"clusters": job.clusters.model_copy(update={"actor_infer": wide})})
    with pytest.raises(SpecError, match=r"actor_infer needs 4 devices for one bundle.*gives each job 2"):
        split_devices([job, job], 4)
