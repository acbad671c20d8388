"""The campaign's light jobs: started, started again when they die, and read at the end."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from benchmarks.faults.crew import CONTEXT, crew, script

_LOOK_S = 0.1
Jobs = Mapping[str, tuple[Callable[..., None], int]]  # by name: the program, and the devices of its gang
JOBS: Jobs = {
    "crew-a": (crew, 2),
    "crew-b": (crew, 3),
    "crew-c": (crew, 1),
    "script-a": (script, 2),
    "script-b": (script, 1),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What the ledgers say. `redone` are trajectories and steps that faults made the jobs do again."""

    steps: int
    trajectories: int
    redone_trajectories: int
    redone_steps: int
    wrong: tuple[str, ...]


class LightJobs:
    """Keeps one process per job alive. A context."""

    def __init__(self, folder: Path, seed: int, jobs: Jobs = JOBS) -> None:
        self._folder, self._seed, self._jobs = folder, seed, jobs
        self.processes: dict[str, Any] = {}
        self.lives = dict.fromkeys(jobs, 0)
        self._stop = threading.Event()
        CONTEXT.set_forkserver_preload(["benchmarks.faults.crew"])
        for name in jobs:
            self._start(name)
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join(10)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]

    def _start(self, name: str) -> None:
        program, gang = self._jobs[name]
        self.lives[name] += 1
        process = CONTEXT.Process(target=program, args=(name, gang, self._folder, self._seed + self.lives[name]))
        process.start()
        self.processes[name] = process

    def _supervise(self) -> None:
        while not self._stop.wait(_LOOK_S):
            for name, process in self.processes.items():
                if not process.is_alive():
                    self._start(name)


def work_of(folder: Path, jobs: Iterable[str] = JOBS) -> Work:
    """Each finished round must hold each of its trajectories exactly once."""
    steps = trajectories = redone = redone_steps = 0
    wrong: list[str] = []
    for name in jobs:
        expected, seen = 0, list[tuple[int, int]]()
        for line in _lines(folder / f"{name}.ledger"):
            kind, number, *rest = line.split()
            if kind == "restart":
                redone += len(seen)
                seen = []
                expected = max(expected, int(number))
            elif kind == "trajectory":
                seen.append((int(number), int(rest[0])))
            else:
                if sorted(seen) != [(int(number), i) for i in range(int(rest[0]))] or int(number) != expected:
                    wrong.append(f"{name}, round {number} (expected {expected}): {rest[0]} wanted, {sorted(seen)}")
                steps, trajectories, seen = steps + 1, trajectories + len(seen), []
                expected = int(number) + 1
        lost = [line.split()[0] for line in _lines(folder / f"{name}.lost")]
        redone += lost.count("trajectory")
        redone_steps += lost.count("step")
    return Work(steps, trajectories, redone, redone_steps, tuple(wrong))


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().splitlines()
    return []
