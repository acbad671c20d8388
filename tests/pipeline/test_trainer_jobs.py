"""What every trainer has, in real jobs: evaluation, checkpoints written beside training, resuming with another spec."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rlix.pipeline.jobs.export import export
from rlix.pipeline.jobs.run_folder import list_checkpoints
from tests.pipeline.training_jobs import Jobs, closing_jobs, learnt, rows, small

pytestmark = pytest.mark.timeout(300)
EVALUATED = {
    "evaluation": {"every": 2, "prompts": 8, "source": {"task": {"name": "copy_digits", "options": {"digits": 3}}}},
    "checkpoint": {"every": 3, "keep": 1},
}
ONE = {"actor_train": {"devices": (1,)}, "actor_infer": {"devices": (0, 1)}}


@pytest.fixture
def jobs(ray_session: Any) -> Iterator[Jobs]:
    with closing_jobs() as made:
        yield made


@pytest.mark.ray
def test_an_evaluated_job_that_shares_learns_what_it_learns_alone_and_unevaluated(jobs: Jobs, tmp_path: Path) -> None:
    evaluated = small("copy_digits", clusters=ONE, **EVALUATED)
    other = small("sort_digits", clusters={"actor_train": {"devices": (0,)}, "actor_infer": {"devices": (0, 1)}})
    jobs.finish(*jobs.start(evaluated, other, runs=tmp_path / "shared"))
    plain = small("copy_digits", clusters=ONE, checkpoint={"every": 2, "asynchronous": False})
    jobs.finish(*jobs.start(plain, runs=tmp_path / "alone"))
    folder, alone = tmp_path / "shared" / "copy_digits", tmp_path / "alone" / "copy_digits"
    assert learnt(folder) == learnt(alone)

    metrics = rows(folder / "metrics.jsonl")
    assert [("eval/reward" in row, "slot_use" in row) for row in metrics] == [
        (step % 2 == 1, True) for step in range(4)
    ]
    assert all(0 < row["slot_use"] <= 1 and row["reward_std"] >= 0 for row in metrics)
    best = (folder / "checkpoints" / "best").resolve()
    assert int(best.name.removeprefix("step_")) in (2, 4)
    assert [step for step, _ in list_checkpoints(folder / "checkpoints")] in ([2, 4], [4])
    assert len(rows(folder / "samples.jsonl")) == 4 + 2 * 4
    assert list((folder / "tensorboard").iterdir())

    longer = small("copy_digits", clusters=ONE, steps=5, optimizer={"learning_rate": 3e-5}, **EVALUATED)
    jobs.finish(*jobs.start(longer, runs=tmp_path / "shared", resume=True))
    after = rows(folder / "metrics.jsonl")
    assert after[:4] == metrics
    assert [row["learning_rate"] for row in after[3:]] == [evaluated.optimizer.learning_rate, 3e-5]
    details = [e["detail"] for e in rows(folder / "events.jsonl") if e.get("event") == "started"]
    assert details == [None, f"steps: 4 → 5; optimizer.learning_rate: {evaluated.optimizer.learning_rate} → 3e-05"]
    export(folder, tmp_path / "exported", step="best")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.vocab_size == 16
