"""N adapters in one job against N jobs with an adapter each, on the same pool: steps per hour, and memory.

    python -m benchmarks.multi_lora [--adapters 1 2 4] [--steps N] [--devices N] [--json]

Steps per hour are counted from the first step of any to the last of all, over all adapters. Memory is the greatest sum,
seen once a second, of the proportional set size of all processes, the control plane's too: shared pages count once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

MIB = 2**20
JOB: dict[str, Any] = {
    "model": {"kind": "tiny", "hidden_size": 256, "layers": 4, "heads": 8},
    "source": {"task": {"name": "sort_digits", "options": {"digits": 4}}},
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 5},
    "optimizer": {"learning_rate": 1e-3},
    "lora": {"rank": 8},
    "clusters": {"actor_train": {"gpus": 1}, "actor_infer": {"gpus": 2}},
}


def one_job(adapters: int, steps: int) -> list[dict[str, Any]]:
    runs = {f"run{i}": {"seed": i} for i in range(adapters)}
    return [{"name": "many", "pipeline": "multi_lora", "steps": steps, **JOB, "runs": runs}]


def own_jobs(adapters: int, steps: int) -> list[dict[str, Any]]:
    return [{"name": f"job{i}", "seed": i, "steps": steps, **JOB} for i in range(adapters)]


def measure(jobs: list[dict[str, Any]], devices: int) -> dict[str, float]:
    """Run them as `rlix run` does, on a control plane of their own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{job['name']}.yaml" for job in jobs]
        for path, job in zip(paths, jobs, strict=True):
            path.write_text(yaml.safe_dump(job))
        runs = Path(folder) / "runs"
        command = [sys.executable, "-m", "rlix.cli", "run", "--private", "--no-live", "--devices", str(devices)]
        start = time.time()
        process = subprocess.Popen(
            [*command, "--runs-dir", str(runs), *map(str, paths)],
            env={**os.environ, "RLIX_HOME": f"{folder}/home"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory(f"{folder}/home"))
            time.sleep(1)
        if process.returncode:
            raise SystemExit(f"the jobs failed (exit code {process.returncode})")
        rows = [json.loads(line) for job in jobs for line in metrics(runs / job["name"]).splitlines()]
    times = sorted(row["time"] for row in rows)
    rate = 3600 * (len(times) - 1) / (times[-1] - times[0])
    return {"steps_per_h": rate, "seconds": time.time() - start, "mib": peak / MIB}


def metrics(folder: Path) -> str:
    return (folder / "metrics.jsonl").read_text()


def memory(home: str) -> int:
    """Bytes of all processes of a control plane, and of the jobs on it."""
    found = 0
    for process in psutil.process_iter():
        try:
            if process.environ().get("RLIX_HOME") == home:
                found += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=20, help="of each adapter")
    parser.add_argument("--devices", type=int, default=2, help="virtual GPUs of the pool")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[int, dict[str, dict[str, float]]] = {}
    for count in args.adapters:
        load = os.getloadavg()[0]
        results[count] = {
            "one job": measure(one_job(count, args.steps), args.devices),
            "own jobs": measure(own_jobs(count, args.steps), args.devices),
        }
        one, own = results[count]["one job"], results[count]["own jobs"]
        if not args.json:
            faster, smaller = one["steps_per_h"] / own["steps_per_h"], one["mib"] / own["mib"]
            print(
                f"{count} adapters, one job and jobs of their own: {one['steps_per_h']:,.0f} and "
                f"{own['steps_per_h']:,.0f} steps/h ({faster:.2f} x); "
                f"{one['mib']:,.0f} and {own['mib']:,.0f} MiB ({smaller:.2f} x); "
                f"{one['seconds']:.0f} and {own['seconds']:.0f} s in all; load {load:.1f} before",
                flush=True,
            )
    if args.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
