"""N adapters in one job against N jobs with an adapter each, on the same pool: steps per hour, and memory.

    python -m benchmarks.multi_lora [--adapters 1 2 4] [--steps N] [--devices N] [--plain] [--json]

Virtual devices have the speed declared below (docs/rehearsal.md), unless `--plain`: then they compute as fast as the
cores do, which all of them share, so that a batch with four adapters costs four times what one costs, as on no GPU.

Steps are counted while all adapters train: after the last of them has taken its first step, until one is through.
`late` is what work took longer than declared, as a share of the devices' time: above a few percent, it is this machine
that was measured. Memory is the greatest sum, seen every two seconds, of the proportional set size of all processes
(shared pages count once): of the jobs' own, and with those of Ray and the control plane, which every pool has once.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
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
# A policy that has learnt nothing ends its answers by chance: their lengths are geometric, so a step has stragglers.
DECLARED_JOB: dict[str, Any] = {
    **JOB,
    "model": {"kind": "tiny", "hidden_size": 64, "layers": 2, "heads": 4},
    "source": {"task": {"name": "copy_digits", "options": {"digits": 6}}},
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 32, "max_num_seqs": 256},
}
# The simulator's GPU for a 7B model, each token of ours standing for 300 of its, at twenty times the pace; 0.1 ms for
# a token of a forward and a backward that is given its activations anew. Only adapters are synced: 0.1 s in place of 1.
SPEED = {
    "token_ms": 150.0,
    "knee": 96.0,
    "kv_us": 600.0,
    "prefill_us": 375.0,
    "trained_token_ms": 1.5,
    "scored_token_ms": 0.5,
    "expand_s": 0.3,
    "sync_s": 0.005,
    "shrink_s": 0.1,
    "move_s": 0.25,
}
OF_JOBS = {"JobCoordinator", "PipelineActor", "TrainWorker", "Replica"}
ADAPTER_SHARE = (
    0.006  # of the bytes that a decoding step reads, for each adapter: rank 16 on a 7B model's linear layers
)


def jobs_of(adapters: int, steps: int, *, together: bool, plain: bool) -> list[dict[str, Any]]:
    base = {"steps": steps, **(JOB if plain else DECLARED_JOB)}
    if not plain:
        in_a_batch = adapters if together else 1
        base["declared_speed"] = {**SPEED, "token_ms": SPEED["token_ms"] * (1 + ADAPTER_SHARE * in_a_batch)}
    if not together:
        return [{"name": f"job{i}", "seed": i, **base} for i in range(adapters)]
    return [
        {"name": "many", "pipeline": "multi_lora", **base, "runs": {f"run{i}": {"seed": i} for i in range(adapters)}}
    ]


def measure(jobs: list[dict[str, Any]], devices: int) -> dict[str, Any]:
    """Run them as `rlix run` does, on a control plane of their own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{job['name']}.yaml" for job in jobs]
        for path, job in zip(paths, jobs, strict=True):
            path.write_text(yaml.safe_dump(job))
        runs = Path(folder) / "runs"
        command = [sys.executable, "-m", "rlix.cli", "run", "--private", "--no-live", "--gpus", str(devices)]
        start = time.time()
        process = subprocess.Popen(
            [*command, "--runs-dir", str(runs), *map(str, paths)],
            env={**os.environ, "RLIX_HOME": f"{folder}/home"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        most: Counter[str] = Counter()
        while process.poll() is None:
            most = max(most, memory(f"{folder}/home"), key=lambda found: found.total())
            time.sleep(2)
        if process.returncode:
            raise SystemExit(f"the jobs failed (exit code {process.returncode})")
        curves = list(runs.glob("*/runs/*/metrics.jsonl")) or list(runs.glob("*/metrics.jsonl"))
        found = speed([lines(path) for path in curves], devices)
        found["device_s"] = spent(
            [row for path in runs.glob("*/events.jsonl") for row in lines(path)], *found.pop("window")
        )
    seconds, mib = time.time() - start, {kind: round(held / MIB) for kind, held in most.most_common()}
    own = sum(held for kind, held in mib.items() if kind in OF_JOBS)
    return {**found, "seconds": seconds, "mib": own, "mib_in_all": sum(mib.values()), "mib_of": mib}


def speed(curves: list[list[dict[str, Any]]], devices: int) -> dict[str, Any]:
    """Of each adapter its rows of metrics."""
    begin, end = max(rows[0]["time"] for rows in curves), min(rows[-1]["time"] for rows in curves)
    steps = sum(begin < row["time"] <= end for rows in curves for row in rows)
    late_s = sum(row.get("late_s", 0.0) for rows in curves for row in rows)
    decode_late_s = [rows[-1].get("decode_late_s", 0.0) for rows in curves]
    shared = len(set(decode_late_s)) < len(decode_late_s)
    first, last = min(rows[0]["time"] - rows[0]["step_s"] for rows in curves), max(rows[-1]["time"] for rows in curves)
    late_s += max(decode_late_s) if shared else sum(decode_late_s)
    late = late_s / (devices * (last - first))
    return {"steps_per_h": 3600 * steps / (end - begin), "steps": steps, "late": late, "window": (begin, end)}


def spent(events: list[dict[str, Any]], begin: float, end: float) -> dict[str, float]:
    """Device seconds by what was done in them, in the window; they may overlap."""
    found: Counter[str] = Counter()
    for row in events:
        if row["type"] == "span":
            inside = min(row["end"], end) - max(row["start"], begin)
            found[f"{row['phase']} {row['kind']}"] += max(0.0, inside)
    return {"window": end - begin, **{name: round(seconds, 1) for name, seconds in found.most_common()}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def memory(home: str) -> Counter[str]:
    """Bytes of all processes of a control plane, and of the jobs on it, by what they are."""
    found: Counter[str] = Counter()
    for process in psutil.process_iter():
        try:
            if process.environ().get("RLIX_HOME") == home:
                found[kind_of(process)] += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def kind_of(process: psutil.Process) -> str:
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").split(".")[0].strip()
    text = " ".join([Path(words[0]).name, *words[1:3]]) if words else process.name()
    return re.sub(r"[0-9a-f]{6,}|\d+", "N", text)[:40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=10, help="of each adapter")
    parser.add_argument("--devices", type=int, default=2, help="virtual GPUs of the pool")
    parser.add_argument("--plain", action="store_true", help="without a declared speed")
    parser.add_argument("--only", choices=("one job", "own jobs"), help="leave out the other side")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[int, dict[str, dict[str, Any]]] = {}
    for count in args.adapters:
        for side in ("one job", "own jobs"):
            if args.only in (None, side):
                load = os.getloadavg()[0]
                jobs = jobs_of(count, args.steps, together=side == "one job", plain=args.plain)
                found = {**measure(jobs, args.devices), "load": (load, os.getloadavg()[0])}
                results.setdefault(count, {})[side] = found
                print(f"{count} adapters, {side}: {described(found)}", file=sys.stderr, flush=True)
        if args.only is None:
            one, own = results[count]["one job"], results[count]["own jobs"]
            faster, smaller, in_all = (one[key] / own[key] for key in ("steps_per_h", "mib", "mib_in_all"))
            memories = f"{smaller:.2f} x the memory ({in_all:.2f} x in all)"
            print(f"{count} adapters in one job: {faster:.2f} x the steps per hour, {memories}", flush=True)
    if args.json:
        print(json.dumps(results, indent=2))


def described(found: dict[str, Any]) -> str:
    before, after = found["load"]
    took = f"{found['seconds']:.0f} s in all, load {before:.0f} and {after:.0f}"
    return (
        f"{found['steps_per_h']:,.0f} steps/h ({found['steps']} steps), {found['late']:.1%} late, "
        f"{found['mib']:,} MiB of {found['mib_in_all']:,}, {took}"
    )


if __name__ == "__main__":
    main()
