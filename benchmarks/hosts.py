"""Jobs over three hosts, each of which is cut off for 20 s in turn: what becomes of them, and how soon they go on. And
what they do in half a minute in which 2 % of the packets between them are lost.

    python -m benchmarks.hosts [seconds]

They are network namespaces of this machine: that takes root, iproute2 and nftables. `on1`, `on2` and `on3` are jobs of
one host each, `over` trains on two devices of hosts 1 and 2. Ray's head, and with it the control plane, is on host 1.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.hosts import SHARED, Hosts, why_not

DEVICES = {"on1": [1], "on2": [3], "on3": [5], "over": [0, 2]}
LOST, LOSS_S = 2, 30.0  # percent of the packets between hosts
CUT_S, REST_S, START_S, END_S = 20.0, 40.0, 300.0, 120.0


def spec(name: str, devices: list[int]) -> dict[str, Any]:
    return {
        "name": name,
        "steps": 100_000,
        "source": {"task": {"name": "sort_digits", "options": {"digits": 2}}},
        "model": {"kind": "tiny", "hidden_size": 16, "layers": 1, "heads": 2},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 3, "executor": "transformers"},
        "algorithm": {"name": "grpo"},
        "optimizer": {"learning_rate": 5e-4},
        "checkpoint": {"every": 20},
        "clusters": {"actor_train": {"devices": devices}, "actor_infer": {"devices": devices}},
    }


class Runs:
    """What the jobs' run folders say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def times(self, name: str) -> list[float]:
        """When each step ended, in Unix seconds."""
        return [row["time"] for row in self._rows(name, "metrics.jsonl")]

    def resumes(self, name: str) -> int:
        said = [row.get("event") for row in self._rows(name, "events.jsonl") if row["type"] == "job"]
        return said.count("started") - 1

    def until_all(self, since: float, timeout_s: float) -> None:
        deadline = time.time() + timeout_s
        while any(not (times := self.times(name)) or times[-1] < since for name in DEVICES):
            if time.time() > deadline:
                return
            time.sleep(0.5)

    def _rows(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self._folder / name / file
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]


def pause(times: list[float], since: float) -> str:
    """Seconds from then until the first step that ended later."""
    later = [when - since for when in times if when > since]
    return f"{later[0]:.1f} s" if later else "never"


def steps(runs: Runs, seconds: float) -> list[str]:
    """How many each job ends from now on, in so many seconds."""
    since = time.time()
    time.sleep(seconds)
    return [f"{sum(when > since for when in runs.times(name))} steps" for name in DEVICES]


def main(cut_s: float = CUT_S) -> None:
    if reason := why_not():
        print(f"no hosts can be made here: {reason}")
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(Path(folder) / "h", 3, {"RAY_ADDRESS": "10.77.0.1:6379"}) as hosts,
    ):
        for number in (1, 2, 3):
            hosts.start_ray(number, gpus=2)
        runs = Runs(hosts.shared / "runs")
        for name, devices in DEVICES.items():
            (hosts.shared / f"{name}.yaml").write_text(yaml.safe_dump(spec(name, devices)))
        files = [str(SHARED / f"{name}.yaml") for name in DEVICES]
        command = "rlix", "run", *files, "--runs-dir", str(SHARED / "runs"), "--no-live"
        running = hosts.start(1, *command, output=Path(folder) / "said")
        runs.until_all(0.0, START_S)
        print(f"| cut off for {cut_s:g} s | {' | '.join(DEVICES)} |\n|---{'|---' * len(DEVICES)}|")
        for number in (1, 2, 3):
            hosts.cut(number)
            cut = time.time()
            time.sleep(cut_s)
            hosts.heal(number)
            healed = time.time()
            runs.until_all(healed, REST_S)
            cells = []
            for name in DEVICES:
                times = runs.times(name)
                during = sum(cut < when < healed for when in times)
                cells.append(f"{during} steps, then {pause(times, healed)}")
            print(f"| host {number} | {' | '.join(cells)} |", flush=True)
        print(f"\n| {LOSS_S:g} s | {' | '.join(DEVICES)} |\n|---{'|---' * len(DEVICES)}|")
        print(f"| nothing lost | {' | '.join(steps(runs, LOSS_S))} |", flush=True)
        with hosts.lossy(LOST):
            print(f"| {LOST} % of the packets lost | {' | '.join(steps(runs, LOSS_S))} |", flush=True)
        states = running.poll()
        resumes = ", ".join(f"{name} {runs.resumes(name)}" for name in DEVICES)
        print(f"\nstarted again: {resumes}; {'all run' if states is None else 'one has ended'}")
        hosts.attempt(1, "rlix", "stop", "--all", "--now")
        running.wait(END_S)


if __name__ == "__main__":
    main(*(float(argument) for argument in sys.argv[1:]))
