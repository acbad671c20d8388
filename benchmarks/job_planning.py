"""Predicted against measured step times of planned jobs, on virtual GPUs of declared speed.

    python -m benchmarks.job_planning [--steps 4] [--only NAME] [--json FILE]

Each job leaves its clusters to a plan (`plan:` in its spec) and is run by `rlix run`, as a user would. What is
compared is the plan's seconds of a step with the median of those measured, the first one left out. `late` is what work
took longer than declared, as a share of the steps' time: where it is more than a few percent, this machine was
measured and not the plan.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rlix.monitor.records import load_run
from rlix.pipeline.spec.job import JobSpec

GPUS = 4
SPEED = {  # slow, so that what this machine's two cores add to every hand-over is small beside it
    "token_ms": 600.0,
    "knee": 48.0,
    "kv_us": 400.0,
    "prefill_us": 400.0,
    "trained_token_ms": 8.0,
    "scored_token_ms": 2.0,
    "expand_s": 1.2,
    "sync_s": 0.4,
    "shrink_s": 0.8,
    "move_s": 0.8,
}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "on policy, fastest": {},
    "on policy, disaggregated": {"plan": {"mode": "disaggregated"}},
    "with a reference model": {"algorithm": {"options": {"kl_coefficient": 0.05}}},
    "a step ahead, fastest": {"schedule": "ahead"},
}


def job(number: int, changes: Mapping[str, Any], steps: int) -> JobSpec:
    digits = 10
    values = {
        "name": f"planned_{number}",
        "steps": steps,
        "source": {"task": {"name": "copy_digits", "options": {"digits": digits}}},
        "warmup": {"steps": 60},
        "rollout": {
            "prompts_per_step": 16,
            "samples_per_prompt": 8,
            "max_new_tokens": digits + 1,
            "max_num_seqs": 32,
        },
        "declared_speed": SPEED,
        **changes,
        "plan": {"prompt_tokens": digits + 2, "answer_tokens": 9, "answer_spread": 0.25, **changes.get("plan", {})},
    }
    return JobSpec.model_validate_json(json.dumps(values))


def run(spec: JobSpec) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(spec.to_yaml())
        command = [sys.executable, "-m", "rlix.cli", "run", "--private", str(file), "--runs-dir", folder]
        environment = {**os.environ, "RLIX_VIRTUAL_GPUS": str(GPUS)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        record = load_run(Path(folder, spec.name))
    plan, rows = record.spec["plan"], record.metrics[1:]
    seconds = sum(row["step_s"] for row in record.metrics)
    late_s = sum(row.get("late_s", 0.0) for row in record.metrics) + record.metrics[-1]["decode_late_s"]
    return {
        "plan": plan["chosen"],
        "predicted_s": plan["step_s"],
        "measured_s": median(row["step_s"] for row in rows),
        "length": median(row["length"] for row in rows),
        "late": late_s / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=list(JOBS), action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {args.steps} steps on {GPUS} virtual GPUs")
    print("| job | plan | predicted s | measured s | off | late |\n|---|---|--:|--:|--:|--:|")
    for number, (name, changes) in enumerate(JOBS.items()):
        if args.only and name not in args.only:
            continue
        found[name] = row = run(job(number, changes, args.steps))
        off = row["measured_s"] / row["predicted_s"] - 1
        print(
            f"| {name} | {row['plan']} | {row['predicted_s']:.2f} | {row['measured_s']:.2f} | {off:+.1%} | "
            f"{row['late']:.1%} |",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
