"""A real job whose policy changes in the middle of an answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlix.node.run_folder import list_checkpoints
from tests.pipeline.training_jobs import Jobs, ahead, closing_jobs, on_two_devices, rows, still_runs


@pytest.fixture
def jobs(ray_session: Any) -> Iterator[Jobs]:
    with closing_jobs() as made:
        yield made


@pytest.mark.ray
def test_updates_in_flight_lose_and_double_no_trajectory(jobs: Jobs, tmp_path: Path) -> None:
    # Answers that take longer than a training step: of a hundred tokens, since one of many characters ends them.
    alphabet = "0123456789>=" + "".join(chr(code) for code in range(0x100, 0x1A0))
    spec = ahead(
        {"max_staleness": 1, "in_flight": "continue"},
        name="through_updates",
        warmup=None,
        model={"alphabet": alphabet, "context": 256},
        rollout={"max_new_tokens": 200},
        checkpoint={"every": 2},
        clusters=on_two_devices(6),
    )
    folder = tmp_path / spec.name
    (first,) = jobs.start(spec, runs=tmp_path)
    while not list_checkpoints(folder / "checkpoints"):
        still_runs(first)
    jobs.close(first)
    before = rows(folder / "metrics.jsonl")[:2]
    jobs.finish(*jobs.start(spec, runs=tmp_path, resume=True))
    metrics = rows(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(spec.steps))
    assert {m["trajectories"] for m in metrics} == {spec.trajectories_per_step}
    assert sum(m["mixed"] for m in metrics) > 0, "no answer was being generated when new weights came"
    assert max(m["staleness_max"] for m in metrics) == 1
    assert metrics[:2] == before
    assert metrics[2]["staleness_max"] == 0, "what was in flight is generated again, with the checkpoint's weights"
