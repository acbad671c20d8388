"""Jobs whose generation and training backends are the user's own."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlix.pipeline.spec.job import load_job, shipped_path
from rlix.protocol.errors import SpecError
from tests.pipeline import own_backends
from tests.pipeline.training_jobs import STEPS, closing_jobs, rows, small

FILE, MODULE = own_backends.__file__, own_backends.__name__


@pytest.mark.ray
def test_a_job_runs_on_backends_of_its_own(ray_session: Any, tmp_path: Path) -> None:
    """Layers are cut over two devices to train, and what replicas load is what was trained."""
    seen = tmp_path / "seen"
    seen.mkdir()
    spec = small(
        name="own",
        rollout={"executor": f"{FILE}:Generates", "executor_options": {"seen": str(seen), "max_model_len": 32}},
        training={"executor": f"{MODULE}:Trains"},
        clusters={"actor_infer": {"devices": (0, 1)}},
    )
    with closing_jobs() as jobs:
        jobs.finish(*jobs.start(spec, runs=tmp_path))
    assert len(list(seen.iterdir())) == 2
    steps = rows(tmp_path / "own" / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert all(step["grad_norm"] > 0 and abs(step["mismatch_kl"]) < 1e-9 for step in steps)


@pytest.mark.parametrize(
    ("section", "given", "message"),
    [
        ("rollout", {"executor": "sglang"}, "rollout.executor: must be transformers, vllm, file.py:name or"),
        ("rollout", {"executor": f"{MODULE}:Nobody"}, "rollout.executor: module '.*' has no 'Nobody'"),
        ("rollout", {"executor": f"{MODULE}:Trains"}, "rollout.executor: .* not a subclass of .*InferenceExecutor"),
        (
            "rollout",
            {"executor": f"{MODULE}:Generates"},
            "rollout.executor_options.seen: is missing",
        ),
        (
            "rollout",
            {"executor": f"{MODULE}:SPAWNED", "executor_options": {"seen": ".", "sen": 1}},
            "rollout.executor_options.sen: unknown key; did you mean 'seen'",
        ),
        (
            "rollout",
            {"executor": f"{MODULE}:Generates", "executor_options": {"seen": ".", "max_model_len": 0}},
            "rollout.executor_options.max_model_len: must be greater than 0",
        ),
        ("training", {"executor": "megatron"}, "training.executor: must be fsdp2, file.py:name or"),
        ("training", {"executor": f"{MODULE}:Generates"}, "training.executor: .* not a subclass of .*TrainExecutor"),
        ("training", {"executor": "rlix.engine.train.executor:TrainExecutor"}, "training.executor: .* has no arrange"),
    ],
)
def test_a_backend_that_is_none_is_said_before_the_start(
    section: str, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job = yaml.safe_load(shipped_path("sort_digits").read_text())
    job[section] = {**job.get(section, {}), **given}
    (tmp_path / "job.yaml").write_text(yaml.dump(job))
    with pytest.raises(SpecError, match=message) as raised:
        load_job(tmp_path / "job.yaml")
    assert "\n" not in str(raised.value)


def test_a_backends_file_is_beside_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(FILE).read_text())
    job = yaml.safe_load(shipped_path("sort_digits").read_text())
    job["rollout"] |= {"executor": "mine.py:SPAWNED", "executor_options": {"seen": "."}}
    job["training"] = {"executor": "mine.py:Trains"}
    (tmp_path / "job.yaml").write_text(yaml.dump(job))
    spec = load_job(tmp_path / "job.yaml")
    assert spec.rollout.executor == f"{tmp_path}/mine.py:SPAWNED"
    assert spec.training.executor == f"{tmp_path}/mine.py:Trains"
