"""What sharing gives on declared GPUs: shared, split and one after another, in wall time, and as the simulator says.

    python -m benchmarks.rehearsal [reasoning] [agentic] [--steps 8] [--only MODE] [--json FILE]

Real jobs, real learning and the real control plane, on eight virtual GPUs with the speed declared below: every phase
waits until it has lasted as long as on those GPUs (docs/job-spec.md, `declared_speed`). Six jobs:

- `reasoning`: digits to copy, whose number is lognormal (median 6, sigma 1.2, at most 32), so a step has stragglers;
- `agentic`: chains of tool calls of 0.16 s at the median and 2.7 s at the 99th percentile.

Modes: `shared`; `split`, where each job has an eighth of the pool to itself and trains there, too; `queued`, where as
many jobs at a time as their training gangs fit beside each other have equal parts; `alone`, one job after another on
the whole pool. Times count from the first step, so start-up is left out everywhere. `late` is what work took longer
than declared, as a share of the time that all jobs stepped: above a few percent, it is this machine that was measured.
"""

import argparse
import json
import logging
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from rlix.monitor.records import RunRecord, load_run
from rlix.pipeline.spec.declared import DeclaredSpeedSpec
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.sim.results import simulate_one
from rlix.sim.workload import Workload

GPUS, JOBS, GANG = 8, 6, 2
MODES = ("shared", "split", "queued", "alone")
POLICY = {"shared": "rlix", "split": "static", "queued": "slots", "alone": "exclusive"}

# A 7B model's 10 ms for a decoding step on one GPU, each token of ours standing for 600 of its and each sample for
# four, at twenty times the pace; what it takes to train a token and to load is scaled alike.
SPEED = DeclaredSpeedSpec(
    token_ms=300.0,
    knee=12.0,
    kv_us=800.0,
    prefill_us=800.0,
    trained_token_ms=5.6,
    scored_token_ms=1.6,
    expand_s=0.6,
    sync_s=0.1,
    shrink_s=0.2,
    move_s=0.2,
)
PROMPTS, SAMPLES, SEQUENCES = 16, 4, 16
LONGEST = 33.0  # tokens of a sample
NORMAL = NormalDist()
ENVIRONMENT = {"tokens_per_turn": 2.5, "latency_p50_s": 0.16, "latency_p99_s": 2.7, "reset_s": 1.0}


def reasoning(number: int, steps: int) -> JobSpec:
    spec = load_job("copy_digits")
    task = {"task": {"name": "copy_digits", "options": {"digits": 6, "spread": 1.2}}}
    batch = {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
    rollout = {**batch, "max_new_tokens": 33, "max_num_seqs": SEQUENCES}
    return _declared(spec, f"reason_{number}", number, steps, {"source": task}, rollout)


def agentic(number: int, steps: int) -> JobSpec:
    spec = load_job("agentic_lookup")
    source = spec.model_dump(mode="json", exclude_none=True)["source"]
    source["environment"]["options"] |= {"latency_scale": 1.0, "failure_rate": 0.0}
    source["environment"] |= {"reset_timeout_s": 20.0, "step_timeout_s": 20.0}
    return _declared(spec, f"agent_{number}", number, steps, {"source": source}, {})


def _declared(
    spec: JobSpec, name: str, seed: int, steps: int, changes: dict[str, Any], rollout: dict[str, Any]
) -> JobSpec:
    data = spec.model_dump(mode="json", exclude_none=True)
    data |= {"name": name, "seed": seed, "steps": steps, "declared_speed": SPEED.model_dump()} | changes
    data["rollout"] |= rollout
    data["model"]["context"] = 96
    data["warmup"]["steps"] = 20
    data["clusters"] = {"actor_train": {"gpus": GANG}, "actor_infer": {"gpus": GPUS}}
    return JobSpec.model_validate_json(json.dumps(data))


WORKLOADS = {"reasoning": reasoning, "agentic": agentic}


def run(specs: Sequence[JobSpec], *, split: bool) -> list[RunRecord]:
    """`rlix run`, as a user would type it."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for spec in specs:
            files.append(Path(folder, f"{spec.name}.yaml"))
            files[-1].write_text(spec.to_yaml())
        command = [sys.executable, "-m", "rlix.cli", "run", "--private", *map(str, files), "--runs-dir", folder]
        subprocess.run(
            command + ["--split"] * split,
            env={**os.environ, "RLIX_VIRTUAL_GPUS": str(GPUS)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return [load_run(Path(folder, spec.name)) for spec in specs]


def stepping_s(records: Sequence[RunRecord]) -> float:
    """From the first step of any of them to the end of the last."""
    first = min(event.time for record in records for event in record.job_events if event.event == "first_step")
    return max(row["time"] for record in records for row in record.metrics) - first


def measured(mode: str, specs: Sequence[JobSpec]) -> tuple[float, list[RunRecord]]:
    sizes = {"shared": len(specs), "split": len(specs), "queued": GPUS // GANG, "alone": 1}
    waves = [specs[i : i + sizes[mode]] for i in range(0, len(specs), sizes[mode])]
    runs = [run(wave, split=mode in ("split", "queued")) for wave in waves]
    return sum(map(stepping_s, runs)), [record for records in runs for record in records]


def predicted(mode: str, specs: Sequence[JobSpec], records: Sequence[RunRecord]) -> float:
    """By the simulator, from what was declared and from how long samples were on average; of times it knows nothing."""
    rows = [row for record in records for row in record.metrics]
    length, context = (fmean(row[name] for row in rows) for name in ("length", "context"))
    rollout = specs[0].rollout
    trajectories = rollout.prompts_per_step * rollout.samples_per_prompt
    trained_s = trajectories * context * SPEED.trained_token_ms / 1e3 / GANG
    spread = 1.2 if specs[0].source.task is not None else 0.3
    job: dict[str, Any] = {
        "name": "job",
        "count": len(specs),
        "steps": specs[0].steps,
        "initialization_s": 1e-3,
        "rollout": {
            "trajectories": trajectories,
            "group": rollout.samples_per_prompt,
            "prompt_tokens": round(context - length),
            "gpus": GPUS,
            "lengths": {"median": median_of(length, spread, LONGEST), "sigma": spread, "cap": LONGEST},
            "decode": {
                "max_batch": rollout.max_num_seqs,
                **{name: getattr(SPEED, name) for name in ("token_ms", "knee", "kv_us", "prefill_us")},
            },
        },
        "gangs": [{"phase": "actor_training", "gpus": GANG, "seconds": trained_s + 2 * SPEED.move_s, "jitter": 0.0}],
    }
    if specs[0].source.environment is not None:
        job["rollout"]["environment"] = ENVIRONMENT
    switching = {name: getattr(SPEED, name) for name in ("expand_s", "shrink_s", "sync_s")}
    workload = Workload.model_validate(
        {
            "name": mode,
            "pool": {"gpus": GPUS, "gpus_per_node": GPUS},
            "switching": {**switching, "move_s": 0.0, "heartbeat_s": 1.0},
            "jobs": [job],
        }
    )
    return fmean(simulate_one(workload, POLICY[mode], seed).makespan_s for seed in range(5))


def median_of(mean: float, sigma: float, cap: float) -> float:
    """The median of a lognormal distribution, cut at `cap`, that has this mean; by bisection."""

    def cut_mean(median: float) -> float:
        edge = math.log(cap / median) / sigma
        below = median * math.exp(sigma**2 / 2) * NORMAL.cdf(edge - sigma)
        return below + cap * (1 - NORMAL.cdf(edge))

    low, high = 1e-3, cap
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return low


def lateness(records: Sequence[RunRecord]) -> float:
    rows = [row for record in records for row in record.metrics]
    late_s = sum(row["late_s"] for row in rows) + sum(record.metrics[-1]["decode_late_s"] for record in records)
    return late_s / sum(row["step_s"] for row in rows)


HEAD = f"{'':20} {'measured s':>10} {'simulated s':>11} {'error':>7} {'shared is':>10} {'late':>6} {'reward':>14}"


def line(name: str, mode: str, row: dict[str, float], shared_s: float | None) -> str:
    error = row["simulated_s"] / row["measured_s"] - 1
    times = f"{row['measured_s'] / shared_s:.2f} x" if shared_s else ""
    reward = f"{row['first_reward']:.2f} -> {row['last_reward']:.2f}"
    return (
        f"{name:11} {mode:8} {row['measured_s']:10.1f} {row['simulated_s']:11.1f} {error:+7.1%} {times:>10} "
        f"{row['late']:6.1%} {reward:>14}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], default=[])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--only", choices=MODES, action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("rlix.control").setLevel(logging.ERROR)  # simulated jobs end, too
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; {args.jobs} jobs of {args.steps} steps on {GPUS} virtual GPUs"
    )
    print(HEAD, flush=True)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.workloads or WORKLOADS:
        specs = [WORKLOADS[name](number, args.steps) for number in range(args.jobs)]
        rows = results[name] = {}
        for mode in args.only or MODES:
            seconds, records = measured(mode, specs)
            rows[mode] = {
                "measured_s": seconds,
                "simulated_s": predicted(mode, specs, records),
                "late": lateness(records),
                "first_reward": fmean(record.metrics[0]["reward"] for record in records),
                "last_reward": fmean(record.metrics[-1]["reward"] for record in records),
            }
            print(line(name, mode, rows[mode], rows.get("shared", {}).get("measured_s")), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
