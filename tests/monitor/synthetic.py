"""Run folders made up for the tests of monitor and cli: two jobs that take turns on a pool, with known times."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

T0 = 1_700_000_000.0


def write_run(
    folder: Path,
    *,
    events: list[dict[str, Any]] | None = None,
    metrics: list[dict[str, Any]] | None = None,
    spec: str | None = None,
) -> Path:
    folder.mkdir(parents=True)
    if events is not None:
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if metrics is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    if spec is not None:
        (folder / "spec.yaml").write_text(spec)
    return folder


def span(
    device: int,
    start: float,
    end: float,
    *,
    phase: str = "rollout",
    kind: str = "busy",
    step: int = 1,
    cluster: str | None = None,
) -> dict[str, Any]:
    cluster = cluster or ("actor_infer" if phase == "rollout" else "actor_train")
    return {
        "type": "span",
        "device": device,
        "cluster": cluster,
        "phase": phase,
        "kind": kind,
        "start": T0 + start,
        "end": T0 + end,
        "step": step,
    }


def job_event(event: str, time: float, detail: str | None = None) -> dict[str, Any]:
    return {"type": "job", "event": event, "time": T0 + time, "detail": detail}


def lease_event(event: str, epoch: int, devices: list[int], time: float, phase: str = "rollout") -> dict[str, Any]:
    return {
        "type": "lease",
        "event": event,
        "epoch": epoch,
        "cluster": "actor_infer",
        "phase": phase,
        "devices": devices,
        "time": T0 + time,
        "reason": None,
        "waited_s": None,
    }


def pool(count: int, time: float = 0.0) -> dict[str, Any]:
    devices = [{"id": i, "node_ip": "127.0.0.1", "kind": "cpu"} for i in range(count)]
    return {"type": "pool", "devices": devices, "time": T0 + time}


@dataclass
class MadeUpJob:
    """One job of `demo_runs`, which writes down what it does step after step."""

    name: str
    trainers: range
    start_level: float
    time_constant: float
    first_epoch: int
    random: Random
    ready: float = 9.5
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def step(self, step: int, free_at: list[float]) -> None:
        """Roll out on every device as it gets free, then train; moves `free_at` on."""
        ends = [self._roll_out(step, device, free_at) for device in range(len(free_at))]
        now = max(*ends, *(free_at[device] for device in self.trainers))
        for phase, seconds in (("old_log_probs", 0.12), ("actor_training", 0.3 + 0.1 * self.random.random())):
            self.events += [span(device, now, now + seconds, phase=phase, step=step) for device in self.trainers]
            now += seconds
        for device in self.trainers:
            self.events.append(span(device, now, now + 0.02, phase="actor_training", kind="sync", step=step))
            free_at[device] = now + 0.02
        self.ready = now + 0.02
        self._learn(step, now)

    def _roll_out(self, step: int, device: int, free_at: list[float]) -> float:
        start = max(free_at[device], self.ready)
        loaded = start + 0.03 + 0.02 * self.random.random()
        end = loaded + 0.35 + 0.5 * self.random.random() ** 2
        epoch = self.first_epoch + 100 * step + device
        self.events += [
            span(device, start, loaded, kind="load", step=step),
            span(device, loaded, end, step=step),
            span(device, end, end + 0.01, kind="offload", step=step),
            lease_event("granted", epoch, [device], start),
            lease_event("released", epoch, [device], end + 0.05),
        ]
        free_at[device] = end + 0.02
        return end

    def _learn(self, step: int, now: float) -> None:
        level = 1 - (1 - self.start_level) * math.exp(-step / self.time_constant)
        exact = min(1.0, max(0.0, level + self.random.gauss(0, 0.03)))
        self.metrics.append(
            {
                "step": step,
                "time": T0 + now,
                "reward": 0.5 * exact + 0.5 * min(1.0, exact + 0.2 * (1 - exact)),
                "exact": exact,
                "loss": self.random.gauss(0, 0.01),
                "tokens": 1280,
                "tokens_per_s": 985 * (1 + 0.1 * self.random.random()),
                "kl": None,
            }
        )

    def end(self) -> None:
        now, step = self.metrics[-1]["time"] - T0, self.metrics[-1]["step"]
        self.events.append({"type": "checkpoint", "step": step, "path": f"checkpoints/step_{step}", "time": T0 + now})
        self.events.append(job_event("finished", now + 0.5))


def demo_runs(folder: Path, *, steps: int = 120, devices: int = 4) -> list[Path]:
    """Two jobs on one pool, as the demo's: one rolls out on everything while the other trains on half of it."""
    random, half = Random(0), devices // 2
    jobs = [
        MadeUpJob("sort_digits", range(half), 0.24, 40.0, 0, random),
        MadeUpJob("copy_digits", range(half, devices), 0.0, 30.0, 50, random),
    ]
    free_at = [9.0 + 0.4 * device for device in range(devices)]
    for job, start in zip(jobs, (5.0, 7.0), strict=True):
        job.events += [pool(devices), job_event("started", 0), job_event("first_step", job.ready)]
        job.events += [span(device, start, start + 1.5, phase="initialization", step=0) for device in range(devices)]
    for step in range(1, steps + 1):
        for job in jobs:
            job.step(step, free_at)
    for job in jobs:
        job.end()
    return [
        write_run(
            folder / job.name,
            events=job.events,
            metrics=job.metrics,
            spec=f"name: {job.name}\ndeclared_speed: {{token_ms: 10}}\n",
        )
        for job in jobs
    ]
