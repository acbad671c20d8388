"""A job of RLix, a TRL script and an RLlib algorithm on one pool of four devices: each learns what it learns alone.

    python -m benchmarks.mixed_pool [--steps N] [--json]

Each runs alone first, the two scripts without RLix; then all three at once, as a user would start them from three
terminals. Ends with an error when a row of a log differs, a script has bytes on a device when it looks, once a step and
outside a lease, or one of the three is not in the report. Rewards and shrinks are shown, not checked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "mixed"
JOB, TRL, RLLIB = NAMES = ("sort_digits", "trl_grpo", "rllib_ppo")
RLIX = [sys.executable, "-m", "rlix.cli"]
TIMEOUT_S = 900.0  # of each program
POOL_TIMEOUT_S = 300.0  # of the first one's control plane to start


@dataclass(frozen=True, slots=True)
class Running:
    process: "subprocess.Popen[bytes]"
    said: Path
    errors: Path

    def end(self) -> str:
        """What it printed. Raises SystemExit when it failed, or took too long, which ends it."""
        try:
            code: object = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = f"none within {TIMEOUT_S:.0f} s"
        if code:
            raise SystemExit(f"{self.process.args!r}: exit code {code}\n{self.errors.read_text()[-4000:]}")
        return self.said.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Terminal:
    """A folder with a control plane and run folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        own = {"RLIX_HOME": "home", "RLIX_LOCK_DIR": "locks", "RLIX_RUNS_DIR": "runs"}
        self._env = os.environ | {name: str(folder / path) for name, path in own.items()}
        self._env |= {"RLIX_VIRTUAL_GPUS": "4", "OMP_NUM_THREADS": "1"}
        self._started = 0

    def start(self, *command: object) -> "Running":
        """What it prints goes into files: one that waited for a reader of its pipe would do so with a lease."""
        self._started += 1
        said, errors = (self.folder / f"{self._started}.{kind}" for kind in ("out", "err"))
        with said.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen([str(part) for part in command], env=self._env, stdout=out, stderr=err)
        return Running(process, said, errors)

    def run(self, *command: object) -> str:
        return self.start(*command).end()

    def await_pool(self, running: "Running") -> None:
        """Raises SystemExit when what was started first has started no control plane."""
        deadline = time.monotonic() + POOL_TIMEOUT_S
        while not (self.folder / "home" / "daemon.json").exists() and running.process.poll() != 0:
            if running.process.poll() or time.monotonic() > deadline:
                running.kill()
                raise SystemExit(
                    f"{running.process.args!r} started no control plane\n{running.errors.read_text()[-4000:]}"
                )
            time.sleep(0.1)

    def rows(self, name: str) -> list[list[float]]:
        if name != JOB:
            logged: list[list[float]] = json.loads((self.folder / name).read_text())["rows"]
            return logged
        lines = (self.folder / "runs" / JOB / "metrics.jsonl").read_text().splitlines()
        keys = ("loss", "grad_norm", "trajectories_digest", "reward")
        return [[row[key] for key in keys] for row in map(json.loads, lines)]


def commands(at: Terminal, model: Path, spec: Path, steps: int, *, plain: bool) -> dict[str, list[object]]:
    trl = [SCRIPTS / f"{TRL}.py", *(() if plain else ("--",)), model, at.folder / TRL, steps]
    rllib = [SCRIPTS / f"{RLLIB}.py", at.folder / RLLIB, max(1, steps // 2)]
    runs = ["--runs-dir", at.folder / "runs"]
    return {
        JOB: [*RLIX, "run", spec, "--json", *runs, *(["--private"] if plain else [])],
        TRL: [sys.executable, *trl] if plain else [*RLIX, "run", "--trl", *runs, *trl],
        RLLIB: [sys.executable, *rllib, *(["plain"] if plain else [])],
    }


def measure(folder: Path, steps: int) -> dict[str, Any]:
    from rlix.pipeline.models import write_tiny_model
    from rlix.pipeline.spec.job import load_job
    from rlix.pipeline.spec.model import TinyModel

    model, spec = write_tiny_model(TinyModel(), folder / "model", seed=0), folder / f"{JOB}.yaml"
    spec.write_text(load_job(JOB).model_copy(update={"steps": steps}).to_yaml())
    alone, pool, seconds = Terminal(folder / "alone"), Terminal(folder / "pool"), {}
    for name, command in commands(alone, model, spec, steps, plain=True).items():
        start = time.monotonic()
        alone.run(*command)
        seconds[name] = time.monotonic() - start
    start = time.monotonic()
    running: list[Running] = []
    try:
        for command in commands(pool, model, spec, steps, plain=False).values():
            running.append(pool.start(*command))
            pool.await_pool(running[0])  # the first one starts it; on a busy machine three at once would start in vain
        for process in running:
            process.end()
        seconds["all at once"] = time.monotonic() - start
    finally:
        for process in running:
            process.kill()  # all have ended, unless one failed
        pool.run(*RLIX, "down")
    report = json.loads(pool.run(*RLIX, "report", "--json", *(pool.folder / "runs" / name for name in NAMES)))
    outside = {name: json.loads((pool.folder / name).read_text())["outside"] for name in (TRL, RLLIB)}
    return {
        "programs": {name: compared(pool.rows(name), alone.rows(name)) for name in NAMES},
        "bytes_outside_leases": outside,
        "report": {job["name"]: {"steps": job["steps"], "shrinks": job["shrinks"]} for job in report["jobs"]},
        "seconds": seconds,
    }


def compared(shared: list[list[float]], alone: list[list[float]]) -> dict[str, Any]:
    """The last of a row is its reward."""
    tenth = max(1, len(shared) // 10)
    rewards = [row[-1] for row in shared]
    return {
        "steps": len(shared),
        "equal_to_alone": sum(a == b for a, b in zip(shared, alone, strict=True)),
        "reward": [sum(some) / tenth for some in (rewards[:tenth], rewards[-tenth:])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the job and of the TRL script; RLlib does half")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.steps)
    if args.json:
        print(json.dumps(result, indent=2))
    for name, row in result["programs"].items() if not args.json else ():
        first, last = row["reward"]
        print(
            f"{name:12} {row['steps']:4} steps, {row['equal_to_alone']} equal to those alone, reward {first:.2f} to "
            f"{last:.2f}, {result['bytes_outside_leases'].get(name, '-')} bytes outside leases; report: "
            f"{result['report'].get(name)}; {result['seconds'][name]:.0f} s alone"
        )
    if not args.json:
        print(f"all at once: {result['seconds']['all at once']:.0f} s")
    same = all(row["equal_to_alone"] == row["steps"] for row in result["programs"].values())
    left = any(bytes_ != 0 for bytes_ in result["bytes_outside_leases"].values())  # None: it was no job of the pool
    if not same or left or set(result["report"]) != set(NAMES):
        raise SystemExit("they did not learn what they learn alone, left bytes behind, or are not in the report")


if __name__ == "__main__":
    main()
