"""Jobs on one GPU by turns: two that ship, which must learn what they learn alone, and two whose states are large."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rlix
from benchmarks.demo import LEARNT
from benchmarks.gpu.common import Row
from benchmarks.gpu.pool import expect, pool, spent, used_mb
from rlix.monitor.records import load_run

JOB_S = 240.0
STEPS, LARGE_STEPS = 10, 4


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name, pool() as devices:
        runs = Path(name)
        before = used_mb(devices)
        sort, copy = (_job(shipped, STEPS) for shipped in ("sort_digits", "copy_digits"))
        alone = _run([sort], runs / "alone")
        again = _run([sort], runs / "again")
        together = _run([sort, copy], runs / "together")
        rows = [
            Row("two jobs of 10 steps together", together.seconds, "s", "one alone", alone.seconds),
            Row("steps that learnt the same again", _same(alone, again), "", "steps", STEPS, "= 1"),
            Row("steps that learnt the same together", _same(alone, together), "", "steps", STEPS, "= 1"),
        ]
        width, layers = (1536, 16) if cuda else (64, 2)
        first, second = (_large(seed, width, layers) for seed in (1, 2))
        alone = _run([first], runs / "large_alone")
        together = _run([first, second], runs / "large_together")
        rows += [
            Row("two large jobs together", together.seconds, "s", "twice one alone", 2 * alone.seconds),
            Row("steps of the large one together", _same(alone, together), "", "steps", LARGE_STEPS, "= 1"),
            Row("left on the GPU by all jobs", used_mb(devices) - before, "MB", "of", 80_000.0, "= 0"),
        ]
        return rows


@dataclass(frozen=True, slots=True)
class _Ended:
    seconds: float
    metrics: Sequence[dict[str, Any]]


def _run(jobs: Sequence[rlix.JobSpec], runs: Path) -> _Ended:
    """The seconds of all, and what the first learnt."""

    def to_the_end() -> None:
        for job in rlix.launch(jobs, runs_dir=runs):
            ended = job.wait(timeout_s=JOB_S)
            expect(ended.state == "finished", f"{job.name}: {ended}")

    seconds = spent(to_the_end)
    return _Ended(seconds, load_run(runs / jobs[0].name).metrics)


def _same(one: _Ended, other: _Ended) -> int:
    pairs = zip(one.metrics, other.metrics, strict=True)
    return sum(all(mine.get(key) == theirs.get(key) for key in LEARNT) for mine, theirs in pairs)


def _job(shipped: str, steps: int) -> rlix.JobSpec:
    base = rlix.load_job(shipped).model_dump() | {"steps": steps}
    base["clusters"] = {"actor_train": {"devices": (0,)}, "actor_infer": {"devices": (0,)}}
    base["rollout"]["executor_options"] = {"exact": True, "kv_cache_memory_bytes": 2**30}
    return rlix.JobSpec.model_validate(base)


def _large(seed: int, width: int, layers: int) -> rlix.JobSpec:
    """Of 0.6 billion parameters: 10 GB of training state leave the GPU at each turn, and come back."""
    base = _job("copy_digits", LARGE_STEPS).model_dump()
    base |= {"name": f"large_{seed}", "seed": seed, "warmup": None}
    base["model"] |= {"hidden_size": width, "layers": layers, "heads": width // 64 if width > 64 else 4}
    base["source"]["task"]["options"] = {"digits": 16}
    base["rollout"] |= {"prompts_per_step": 64, "max_new_tokens": 17}
    return rlix.JobSpec.model_validate(base)
