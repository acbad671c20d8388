"""Real jobs that sample again, train on what older policies sampled, or change policy in the middle of an answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlix.pipeline.jobs.run_folder import list_checkpoints
from rlix.pipeline.spec.job import JobSpec
from tests.pipeline.training_jobs import Jobs, ahead, closing_jobs, on_two_devices, rows, small, still_runs

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def jobs(ray_session: Any) -> Iterator[Jobs]:
    with closing_jobs() as made:
        yield made


def dapo() -> JobSpec:
    """Groups of two, of which many have no spread."""
    return small(
        name="dapo",
        algorithm={"name": "dapo", "resample_rounds": 2},
        rollout={"prompts_per_step": 8, "samples_per_prompt": 2},
        clusters=on_two_devices(0),
    )


def behind(on_stale: str, first: int) -> JobSpec:
    """Trajectories of three steps on the way, where two are allowed."""
    rule = {"max_staleness": 1, "ahead": 2, "on_stale": on_stale}
    return ahead(rule, name=on_stale, warmup=None, clusters=on_two_devices(first))


def through_updates() -> JobSpec:
    """Answers that take longer than a training step: of a hundred tokens, since one of many characters ends them."""
    alphabet = "0123456789>=" + "".join(chr(code) for code in range(0x100, 0x1A0))
    return ahead(
        {"max_staleness": 1, "in_flight": "continue"},
        name="through_updates",
        warmup=None,
        model={"alphabet": alphabet, "context": 256},
        rollout={"max_new_tokens": 200},
        checkpoint={"every": 2},
        clusters=on_two_devices(6),
    )


@pytest.mark.ray
def test_resampling_staleness_and_updates_in_flight_lose_and_double_no_trajectory(jobs: Jobs, tmp_path: Path) -> None:
    specs = [dapo(), behind("drop", 2), behind("rescore", 4), through_updates()]
    *handles, last = jobs.start(*specs, runs=tmp_path)
    checkpoints = tmp_path / "through_updates" / "checkpoints"
    while not list_checkpoints(checkpoints):
        still_runs(last)
    jobs.close(last)
    before = rows(tmp_path / "through_updates" / "metrics.jsonl")[:2]
    jobs.finish(*handles, *jobs.start(specs[-1], runs=tmp_path, resume=True))
    metrics = {spec.name: rows(tmp_path / spec.name / "metrics.jsonl") for spec in specs}
    for spec in specs:
        assert [m["step"] for m in metrics[spec.name]] == list(range(spec.steps))
        assert {m["trajectories"] for m in metrics[spec.name]} == {spec.trajectories_per_step}

    assert sum(m["resampled"] for m in metrics["dapo"]) > 0
    # How old tokens are depends on who was faster; how old they may be, and what follows from it, does not.
    for name in ("drop", "rescore"):
        assert all(m["staleness_max"] <= min(m["step"], 2) for m in metrics[name])
    assert all((m["dropped"] > 0) == (m["staleness_max"] > 1) for m in metrics["drop"])
    assert all(m["dropped"] == 0 and m["grad_norm"] > 0 for m in metrics["rescore"])

    through = metrics["through_updates"]
    assert sum(m["mixed"] for m in through) > 0, "no answer was being generated when new weights came"
    assert max(m["staleness_max"] for m in through) == 1
    assert through[:2] == before
    assert through[2]["staleness_max"] == 0, "what was in flight is generated again, with the checkpoint's weights"
