"""Two real jobs sharing the devices, and the same jobs on a fixed half each: idle shares, both measured.

    python -m benchmarks.sharing [--steps N] [--json]

Run one after the other in the same way, on the same devices; the ratios are within this one invocation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JOBS = ("sort_digits", "copy_digits")


def measure(specs: list[str], split: bool) -> dict[str, Any]:
    """`rlix run --json` as a user would type it, in a process of its own; on four virtual GPUs where there are none."""
    environment = {"RLIX_VIRTUAL_GPUS": "4", **os.environ}
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "rlix.cli", "run", "--private", *specs, "--runs-dir", runs, "--json"]
        result = subprocess.run(
            command + ["--split"] * split,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def shortened(folder: Path, steps: int) -> list[str]:
    """The shipped jobs with another number of steps."""
    from rlix.pipeline.spec.job import load_job

    paths = []
    for name in JOBS:
        path = folder / f"{name}.yaml"
        path.write_text(load_job(name).model_copy(update={"steps": steps}).to_yaml())
        paths.append(str(path))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="training steps of each job (default: as shipped)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        specs = list(JOBS) if args.steps is None else shortened(Path(folder), args.steps)
        results = {"shared": measure(specs, split=False), "split": measure(specs, split=True)}
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for name, summary in results.items():
        print(name, json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
