"""What sharing gives on declared GPUs: shared, split and one after another, in wall time, and as the simulator says.

    python -m benchmarks.rehearsal [WORKLOAD ...] [--seconds 180] [--only MODE] [--json FILE] [--runs-dir DIR]

Real jobs, real learning and the real control plane, on eight virtual GPUs with the speed declared below: every phase
waits until it has lasted as long as on those GPUs (docs/job-spec.md, `declared_speed`). Six jobs:

- `reasoning`: digits to copy, whose number is lognormal (median 6, sigma 1.2, at most 32), so a step has stragglers;
- `training`: the same, and to train a token takes two and a half times as long;
- `agentic`: chains of tool calls of 0.16 s at the median and 2.7 s at the 99th percentile.

Modes: `shared`; `moving`, the same with training gangs that go where there is room (`moves: true`); `block`, where
everyone declares the first devices for its gang, as who does not know of the others would; `split`, where each job has
an eighth of the pool to itself and trains there, too; `queued`, where as many jobs as their training
gangs fit beside each other have equal parts, and the others wait; `alone`, one job on the whole pool. Steps are
counted for a while from when every job has taken one, so start-up is left out everywhere. `late` is what work took
longer than declared, as a share of the time that all jobs stepped: above a few percent, it is this machine that was
measured. `--runs-dir` keeps the run folders and the report of each mode.
"""

import argparse
import json
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from rlix.monitor.records import RunRecord, load_run
from rlix.pipeline.spec.declared import DeclaredSpeedSpec
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.sim.results import simulate_one
from rlix.sim.workload import Workload

GPUS, JOBS, GANG = 8, 6, 2
MODES = ("shared", "moving", "block", "split", "queued", "alone")
POLICY = {
    "shared": "rlix",
    "moving": "rlix",
    "block": "rlix",
    "split": "static",
    "queued": "static",
    "alone": "exclusive",
}
STEPS, SIMULATED_STEPS = 1000, 60  # more than anybody waits for
START_S = 600.0

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
    relocate_s=0.8,
)
PROMPTS, SAMPLES, SEQUENCES = 16, 4, 16
LONGEST = 33.0  # tokens of a sample
NORMAL = NormalDist()
ENVIRONMENT = {"latency_p50_s": 0.16, "latency_p99_s": 2.7, "reset_p50_s": 0.5, "reset_p99_s": 4.0}


def reasoning(number: int, steps: int) -> JobSpec:
    spec = load_job("copy_digits")
    task = {"task": {"name": "copy_digits", "options": {"digits": 6, "spread": 1.2}}}
    batch = {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
    rollout = {**batch, "max_new_tokens": 33, "max_num_seqs": SEQUENCES}
    return _declared(spec, f"reason_{number}", number, steps, {"source": task}, rollout)


def training(number: int, steps: int) -> JobSpec:
    slower = SPEED.model_copy(update={"trained_token_ms": 2.5 * SPEED.trained_token_ms})
    return reasoning(number, steps).model_copy(update={"name": f"train_{number}", "declared_speed": slower})


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
    data["warmup"] |= {"steps": 10, "batch_size": 32}
    data["clusters"] = {"actor_train": {"gpus": GANG}, "actor_infer": {"gpus": GPUS}}
    return JobSpec.model_validate_json(json.dumps(data))


def trained_where(spec: JobSpec, mode: str) -> JobSpec:
    here = {"gpus": None, "devices": tuple(range(GANG))} if mode == "block" else {"moves": mode == "moving"}
    trainer = spec.clusters.actor_train.model_copy(update=here)
    return spec.model_copy(update={"clusters": spec.clusters.model_copy(update={"actor_train": trainer})})


WORKLOADS = {"reasoning": reasoning, "training": training, "agentic": agentic}


def measured(mode: str, specs: Sequence[JobSpec], seconds: float, kept: Path | None) -> list[RunRecord]:
    """The steps that all jobs of a mode took in `seconds` from when each had taken one, by `rlix run` as a user would
    type it. `kept`: where its run folders and its report stay."""
    count = {"queued": GPUS // GANG, "alone": 1}.get(mode, len(specs))
    jobs = [trained_where(spec, mode) for spec in specs[:count]]
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() if kept is None else nullcontext(str(kept)) as folder:
        files = []
        for spec in jobs:
            files.append(Path(folder, f"{spec.name}.yaml"))
            files[-1].write_text(spec.to_yaml())
        command = [sys.executable, "-m", "rlix.cli", "run", "--private", *map(str, files), "--runs-dir", folder]
        command += ["--split"] * (mode in ("split", "queued"))
        environment = {**os.environ, "RLIX_VIRTUAL_GPUS": str(GPUS)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as running:
            try:
                begin = max(first_step(Path(folder, spec.name), running) for spec in jobs)
                time.sleep(max(0.0, begin + seconds - time.time()))
            finally:
                running.send_signal(signal.SIGINT)
        records = [load_run(Path(folder, spec.name)) for spec in jobs]
    return [counted(record, begin, seconds) for record in records]


def counted(record: RunRecord, begin: float, seconds: float) -> RunRecord:
    """With the row of the last step that ended by `begin` (Unix seconds) and those that ended in `seconds` after it."""
    rows = [row for row in record.metrics if row["time"] <= begin + seconds]
    return replace(record, metrics=tuple(rows[max(0, sum(row["time"] <= begin for row in rows) - 1) :]))


def steps_per_h(record: RunRecord) -> float:
    """Of whole steps alone: those that a window cuts would count for as much as chance lets them."""
    first, last = record.metrics[0], record.metrics[-1]
    return 3600 * (len(record.metrics) - 1) / max(last["time"] - first["time"], 1e-9)


def first_step(folder: Path, running: "subprocess.Popen[bytes]") -> float:
    """When a job had taken one (Unix seconds)."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + START_S
    while not metrics.exists() or not (lines := metrics.read_text().splitlines(keepends=True)) or lines[0][-1] != "\n":
        if running.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{folder.name} took no step within {START_S:.0f} s, or ended: its folder was {folder}")
        time.sleep(0.5)
    return float(json.loads(lines[0])["time"])


def predicted(mode: str, specs: Sequence[JobSpec], records: Sequence[RunRecord]) -> float:
    """Steps per hour by the simulator, from what was declared and how long samples and turns were, no times."""
    rows = [row for record in records for row in record.metrics]
    trajectories = specs[0].rollout.prompts_per_step * specs[0].rollout.samples_per_prompt
    declared = specs[0].declared_speed
    assert declared is not None
    trained_s = trajectories * fmean(row["context"] for row in rows) * declared.trained_token_ms / 1e3 / GANG
    gpus = (
        GPUS if POLICY[mode] == "rlix" else GPUS // len(records) * len(records)
    )  # what equal parts leave over is nobody's
    rollout = simulated_rollout(specs[0], rows) | {"trajectories": trajectories, "gpus": gpus}
    job: dict[str, Any] = {
        "name": "job",
        "count": len(records),
        "steps": SIMULATED_STEPS,
        "initialization_s": 1e-3,
        "gang_placement": "same" if mode == "block" else "spread",
        "rollout": rollout,
        "gangs": [{"phase": "actor_training", "gpus": GANG, "seconds": trained_s + 2 * SPEED.move_s, "jitter": 0.0}],
    }
    switching = {name: getattr(SPEED, name) for name in ("expand_s", "shrink_s", "sync_s")}
    workload = Workload.model_validate(
        {
            "name": mode,
            "pool": {"gpus": gpus, "gpus_per_node": gpus},
            "switching": {**switching, "move_s": SPEED.relocate_s, "heartbeat_s": 1.0},
            "jobs": [job],
        }
    )
    workload = workload.moving() if mode == "moving" else workload
    return fmean(simulate_one(workload, POLICY[mode], seed).steps_per_hour_of_all for seed in range(5))


def simulated_rollout(spec: JobSpec, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Of a workload, but for its size: like those of which `rows` are the metrics."""
    length, longest, context = (fmean(row[name] for row in rows) for name in ("length", "length_max", "context"))
    rollout: dict[str, Any] = {
        "group": spec.rollout.samples_per_prompt,
        "decode": {
            "max_batch": spec.rollout.max_num_seqs,
            **{name: getattr(SPEED, name) for name in ("token_ms", "knee", "kv_us", "prefill_us")},
        },
    }
    turns, spread = 1.0, 1.2
    if spec.source.environment is not None:
        turns = fmean(row["turns"] for row in rows)
        spread = spread_of(longest / length, spec.rollout.prompts_per_step * spec.rollout.samples_per_prompt)
    given = round((context - length) / turns)  # before each turn
    if spec.source.environment is not None:
        rollout["environment"] = {**ENVIRONMENT, "tokens_per_turn": length / turns, "result_tokens": given}
    lengths = {"median": median_of(length, spread, LONGEST), "sigma": spread, "cap": LONGEST}
    return rollout | {"prompt_tokens": given, "lengths": lengths}


def spread_of(longest: float, count: int) -> float:
    """The sigma of a lognormal distribution of which the largest of `count` is `longest` times the mean, on average
    (Blom, "Statistical estimates and transformed beta-variables", 1958)."""
    score = NORMAL.inv_cdf((count - 0.375) / (count + 0.25))
    return score - math.sqrt(score**2 - 2 * math.log(longest))


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
    rows = [row for record in records for row in record.metrics[1:]]
    decode_late_s = sum(record.metrics[-1]["decode_late_s"] - record.metrics[0]["decode_late_s"] for record in records)
    late_s = sum(row["late_s"] for row in rows) + decode_late_s
    return late_s / sum(row["step_s"] for row in rows)


HEAD = f"{'steps/h':20} {'measured':>9} {'simulated':>10} {'error':>7} {'shared does':>12} {'late':>6}"


def line(name: str, mode: str, row: dict[str, float], shared: float | None) -> str:
    error = row["simulated"] / row["measured"] - 1
    times = f"{shared / row['measured']:.2f} x" if shared else ""
    figures = f"{row['measured']:9.0f} {row['simulated']:10.0f} {error:+7.1%} {times:>12} {row['late']:6.1%}"
    return f"{name:11} {mode:8} {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], default=[])
    parser.add_argument("--seconds", type=float, default=180.0, help="that steps are counted for")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--only", choices=MODES, action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs-dir", type=Path, help="keep run folders and reports in DIR", metavar="DIR")
    args = parser.parse_args()
    logging.getLogger("rlix.control").setLevel(logging.ERROR)  # simulated jobs end, too
    print(f"{platform.machine()}, {os.cpu_count()} cores; {args.jobs} jobs on {GPUS} virtual GPUs")
    print(HEAD, flush=True)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.workloads or WORKLOADS:
        specs = [WORKLOADS[name](number, STEPS) for number in range(args.jobs)]
        rows = results[name] = {}
        for mode in args.only or MODES:
            kept = args.runs_dir and args.runs_dir / f"{name}_{mode}"
            records = measured(mode, specs, args.seconds, kept)
            rows[mode] = {
                "measured": sum(map(steps_per_h, records)),
                "simulated": predicted(mode, specs, records),
                "late": lateness(records),
            }
            print(line(name, mode, rows[mode], rows.get("shared", {}).get("measured")), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
