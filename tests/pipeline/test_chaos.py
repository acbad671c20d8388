"""Sharing, preemption and dying replicas change nothing that a job learns, and cost no trajectory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlix.pipeline.launch import JobHandle, launch, wait_all
from tests.pipeline.test_jobs import rows
from tests.pipeline.training_jobs import STEPS, ahead, ppo, small

pytestmark = pytest.mark.timeout(600)  # starting processes is slow on a busy machine

LEARNT = ("step", "reward", "exact", "tokens", "loss", "grad_norm", "trajectories", "trajectories_digest")


def learnt(folder: Path) -> list[dict[str, Any]]:
    """What a run sampled and learnt, without anything that time has to do with."""
    return [{name: row[name] for name in LEARNT} for row in rows(folder / "metrics.jsonl")]


class Jobs:
    """Launches jobs, and closes them whatever happens."""

    def __init__(self) -> None:
        self.handles: list[JobHandle] = []

    def start(self, *specs: Any, runs: Path) -> list[JobHandle]:
        self.handles += launch(list(specs), runs)
        return self.handles[-len(specs) :]

    def finish(self, *specs: Any, runs: Path) -> None:
        statuses = wait_all(self.start(*specs, runs=runs), timeout_s=280)
        assert [s.state for s in statuses] == ["finished"] * len(specs), statuses

    def close(self) -> None:
        for handle in self.handles:
            handle.close()


@pytest.fixture
def jobs(ray_session: Any) -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the job `sort_digits` learns when it has the pool to itself."""
    made, folder = Jobs(), tmp_path_factory.mktemp("alone")
    try:
        made.finish(small(), runs=folder)
    finally:
        made.close()
    return learnt(folder / "sort_digits")


@pytest.mark.ray
def test_a_job_learns_the_same_alone_and_preempted_by_another(
    jobs: Jobs, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    jobs.finish(small(), small("copy_digits"), runs=tmp_path)
    shrunk = [e for e in rows(tmp_path / "sort_digits" / "events.jsonl") if e.get("event") == "shrinking"]
    assert shrunk, "nothing was taken from the job, so this shows nothing"
    assert learnt(tmp_path / "sort_digits") == alone


def infer_actors(handle: JobHandle) -> list[str]:
    namespace = f"pipeline_{handle.pipeline_id}_NS"
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == namespace]
    return sorted(name for name in names if "infer" in name)


@pytest.mark.ray
@pytest.mark.slow
def test_three_kinds_of_training_share_four_devices_while_replicas_die(
    jobs: Jobs, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    specs = [small(), ppo(), ahead(asynchronous={"max_staleness": 1, "in_flight": "finish"})]
    handles = jobs.start(*specs, runs=tmp_path)
    untouched = list(handles)
    while untouched:  # one replica of each, once it is at work
        for handle in list(untouched):
            status = handle.status()
            assert status.state in ("starting", "running"), status
            if status.step >= 1:
                name = infer_actors(handle)[0]
                ray.kill(ray.get_actor(name, namespace=f"pipeline_{handle.pipeline_id}_NS"))
                untouched.remove(handle)
    (guest,) = jobs.start(small("copy_digits", steps=1), runs=tmp_path)
    statuses = wait_all([*handles, guest], timeout_s=280)
    assert [s.state for s in statuses] == ["finished"] * 4, statuses

    for spec in specs:
        metrics = rows(tmp_path / spec.name / "metrics.jsonl")
        assert [m["step"] for m in metrics] == list(range(STEPS))
        assert {m["trajectories"] for m in metrics} == {spec.trajectories_per_step}
    assert learnt(tmp_path / "sort_digits") == alone

    phases = {e["phase"] for e in rows(tmp_path / "ppo" / "events.jsonl") if e["type"] == "lease"}
    assert len(phases) == 7, phases
    for metrics in rows(tmp_path / "ppo" / "metrics.jsonl"):
        assert metrics["value_loss"] > 0
        assert metrics["value_grad_norm"] > 0
    ages = [m["staleness_max"] for m in rows(tmp_path / "ahead" / "metrics.jsonl")]
    assert ages == [0, *[1] * (STEPS - 1)]
