"""Many adapters in one job on real replicas: neither preemption nor a death changes anything that they learn."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from rlix.pipeline.spec.job import JobSpec
from tests.pipeline.training_jobs import Jobs, closing_jobs, learnt, replicas, rows, still_runs, until_nothing_is_held

RUNS: dict[str, Any] = {
    "small": {"lora": {"rank": 2, "targets": ["q_proj"]}},
    "dropped": {"lora": {"rank": 8, "dropout": 0.3}, "seed": 9, "algorithm": {"name": "rloo"}},
    "copies": {"source": {"task": {"name": "copy_digits", "options": {"digits": 3}}}, "steps": 3},
}


def job(name: str, runs: Mapping[str, Any]) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": name,
            "pipeline": "multi_lora",
            "seed": 5,
            "steps": 4,
            "source": {"task": {"name": "sort_digits", "options": {"digits": 4}}},
            "model": {"kind": "tiny", "hidden_size": 32, "layers": 1, "heads": 2},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 5},
            "optimizer": {"learning_rate": 1e-2},
            "clusters": {"actor_train": {"devices": (0,)}, "actor_infer": {"devices": (0, 1)}},
            "runs": dict(runs),
        }
    )


@pytest.fixture
def jobs(ray_session: Any) -> Iterator[Jobs]:
    with closing_jobs() as made:
        yield made


@pytest.mark.ray
@pytest.mark.slow
def test_adapters_on_replicas_that_shrink_and_die_learn_what_each_learns_alone(jobs: Jobs, tmp_path: Path) -> None:
    apart = {"one": ("dropped",), "two": ("small", "copies")}  # alone, and in other company
    specs = [job(which, {name: RUNS[name] for name in names}) for which, names in apart.items()]
    jobs.finish(*jobs.start(*specs, runs=tmp_path))
    alone = {name: learnt(tmp_path / which / "runs" / name) for which, names in apart.items() for name in names}
    assert {name: len(found) for name, found in alone.items()} == {"small": 4, "dropped": 4, "copies": 3}

    (together,) = jobs.start(job("together", RUNS), runs=tmp_path)
    folder = tmp_path / "together"
    while not any((folder / "runs" / name / "metrics.jsonl").exists() for name in RUNS):
        still_runs(together)
    for replica in replicas(together)[:1]:  # of the few that are there on busy cores it may have none any more
        ray.kill(replica)
    jobs.finish(together)
    assert {name: learnt(folder / "runs" / name) for name in RUNS} == alone
    assert any(e["type"] == "lease" and e["event"] == "shrinking" for e in rows(folder / "events.jsonl"))
    until_nothing_is_held()
