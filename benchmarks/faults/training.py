"""Two real training jobs under faults: what they learn must equal, to the bit, what they learn alone."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import injectors
from benchmarks.faults.campaign import RECOVERY_S, STOP_NAMES, Campaign, until
from benchmarks.faults.table import Fault
from rlix.pipeline.jobs.handle import FINAL_STATES, JobHandle
from rlix.pipeline.jobs.launch import launch
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.protocol.errors import RlixError
from rlix.protocol.events import PipelineUnregistered
from rlix.protocol.types import (
    ORCHESTRATOR_ACTOR_NAME,
    RESOURCE_MANAGER_ACTOR_NAME,
    SCHEDULER_ACTOR_NAME,
    Phase,
)
from tests.pipeline.training_jobs import learnt

STEPS, CHECKPOINT_EVERY = 16, 2
BY_ITSELF = 3  # every how many faults one ends a job
_FIRST_STEP_S, _FINISH_S = 120.0, 300.0
BUDGET_S = 240.0  # after which no further round begins
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def spec(example: str, first: int, *, moved: int = 0) -> JobSpec:
    """A shipped example in a few small steps: its gang on two devices from `first` on, its rollouts on four."""
    base = load_job(example).model_dump()
    base |= {"steps": STEPS, "warmup": {"steps": 5, "batch_size": 64, "learning_rate": 1e-3}}
    base["rollout"] |= {"prompts_per_step": 8, "samples_per_prompt": 4}
    base["checkpoint"] |= {"every": CHECKPOINT_EVERY, "keep": 2}
    base["clusters"] = {
        "actor_train": {"devices": (first + moved, first + 1 + moved)},
        "actor_infer": {"devices": tuple(moved + device for device in range(4))},
    }
    return JobSpec.model_validate(base)


def alone(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Each job on devices of its own."""
    specs = [spec("sort_digits", 0), spec("copy_digits", 1, moved=4)]
    handles = launch(specs, folder)
    for handle in handles:
        status = handle.wait(_FINISH_S)
        assert status.state == "finished", status
        handle.close()
    return {each.name: learnt(folder / each.name) for each in specs}


class Training:
    """One run of both jobs, side by side on four devices, with resumes."""

    def __init__(self, run: Campaign, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.specs = {each.name: each for each in (spec("sort_digits", 0), spec("copy_digits", 1))}
        self.resumes, self.redone = 0, 0
        handles = launch(tuple(self.specs.values()), folder)
        self.jobs: dict[str, JobHandle] = {handle.name: handle for handle in handles}
        self.wait_for_steps(dict.fromkeys(self.jobs, 0))

    def close(self) -> None:
        for handle in self.jobs.values():
            with contextlib.suppress(RlixError):
                handle.close()

    def steps(self, name: str) -> int:
        path = self.folder / name / "metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def wait_for_steps(self, before: dict[str, int]) -> bool:
        """Until each of these jobs has made another step, or ended."""
        return until(
            lambda: all(self.steps(n) > s or self.jobs[n].status().state in FINAL_STATES for n, s in before.items()),
            _FIRST_STEP_S,
        )

    @property
    def running(self) -> list[str]:
        return [name for name, job in self.jobs.items() if job.status().state not in FINAL_STATES]

    def resume_failed(self) -> float | None:
        """Goes on with jobs that a fault ended; returns the seconds until they made a step, None when there are none.

        The steps since their checkpoints are done again.
        """
        failed = [name for name, job in self.jobs.items() if job.status().state == "failed"]
        if not failed:
            return None
        at = time.time()
        before = {name: self.steps(name) for name in failed}
        for name in failed:
            self.jobs[name].close()
            (self.jobs[name],) = launch([self.specs[name]], self.folder, resume=True)
            self.resumes += 1
        until(lambda: all(self.jobs[n].status().state not in ("starting",) for n in failed), _FIRST_STEP_S)
        now = {name: self.steps(name) for name in failed}
        self.redone += sum(max(0, before[name] - now[name]) for name in failed)
        self.wait_for_steps(now)
        return time.time() - at

    def finish(self) -> list[str]:
        """Lets the jobs end; returns what went wrong."""
        deadline = time.monotonic() + _FINISH_S
        while self.running and time.monotonic() < deadline:
            self.resume_failed()
            time.sleep(0.1)
        self.resume_failed()
        until(lambda: not self.running, max(0.0, deadline - time.monotonic()))
        return [f"{name}: {job.status()}" for name, job in self.jobs.items() if job.status().state != "finished"]

    # -- faults

    def worker(self, rollout: bool, number: signal.Signals, run: Campaign) -> Fault:
        mine = {job.pipeline_id for job in self.jobs.values()}
        lease, victim = run.holder_of(lambda x: x.pipeline_id in mine and (x.phase is Phase.ROLLOUT) is rollout)
        return run.hit(f"training: {'replica' if rollout else 'trainer'}", lease, victim, number)

    def actor(self, title: str, label: str, number: signal.Signals, run: Campaign) -> Fault:
        """A job's own actor, whose end is the job's; recovered when all that it held is free."""
        found = [p for p in run.pool.ours() if _title(p).startswith(title)]
        if not found:
            raise TimeoutError(f"no process {title}")
        at = time.time()
        os.kill(run.rng.choice(found).pid, number)
        ended = run.watcher.wait(at, lambda e: isinstance(e, PipelineUnregistered), RECOVERY_S)
        noticed = run.pool.settings.stopped_s if number == STOP and ended is not None else 0.0
        return Fault(f"training: {label} {STOP_NAMES[number]}", ended, noticed, None, ended is not None)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def inject(run: Campaign, count: int) -> dict[str, object]:
    """`count` faults; returns what went wrong, and what was done again."""
    folder = run.pool.folder / "runs"
    reference = alone(folder / "alone")
    wrong: list[str] = []
    resumes = redone = rounds = 0
    resumed_s: list[float] = []
    left = count
    deadline = time.monotonic() + BUDGET_S
    while left > 0 and time.monotonic() < deadline:
        training = Training(run, folder / f"round-{rounds}")
        rounds += 1
        try:
            left -= _round(training, left, resumed_s)
            wrong += training.finish()
        finally:
            training.close()
        for name, expected in reference.items():
            found = learnt(training.folder / name)
            if found != expected:
                wrong.append(f"round {rounds}, {name}: {_difference(found, expected)}")
        resumes, redone = resumes + training.resumes, redone + training.redone
    return {
        "wrong metrics": wrong,
        "training rounds": rounds,
        "training steps compared": rounds * sum(map(len, reference.values())),
        "resumes": resumes,
        "training steps redone": redone,
        "seconds until a resumed job made a step": [round(s, 1) for s in resumed_s],
    }


def _round(training: Training, left: int, resumed_s: list[float]) -> int:
    run, done = training.run, 0
    actors = {"scheduler": SCHEDULER_ACTOR_NAME, "orchestrator": ORCHESTRATOR_ACTOR_NAME}
    actors["resource manager"] = RESOURCE_MANAGER_ACTOR_NAME
    mild: Sequence[Callable[[Campaign], Fault]] = [
        *(partial(training.worker, True, KILL),) * 4,
        *(partial(training.worker, True, STOP),) * 2,
        *(partial(injectors.control, f"training: {label}", name, KILL) for label, name in actors.items()),
        partial(injectors.control, "training: scheduler", SCHEDULER_ACTOR_NAME, STOP),
    ]
    ending: Sequence[Callable[[Campaign], Fault]] = [
        partial(training.worker, False, KILL),
        partial(training.worker, False, STOP),
        partial(training.actor, "ray::PipelineActor", "pipeline", KILL),
        partial(training.actor, "ray::PipelineActor", "pipeline", STOP),
        partial(training.actor, "ray::JobCoordinator", "coordinator", KILL),
    ]
    while done < left and len(training.running) == 2:
        ends = done % BY_ITSELF == BY_ITSELF - 1
        injector = ending[len(resumed_s) % len(ending)] if ends else run.rng.choice(mild)
        try:
            fault = injector(run)
        except (TimeoutError, RlixError) as error:
            if len(training.running) < 2:
                break  # a job was over before it could be hit
            fault = Fault("training", None, survived=False, note=f"{type(error).__name__}: {error}")
        if ends:
            until(lambda: len(training.running) < 2, 30)
            took = training.resume_failed()
            if took is not None:
                resumed_s.append(took)
                fault = replace(fault, note=f"its job made a step {took:.1f} s after it was resumed")
        else:
            training.resume_failed()
        done += 1
        run.faults.append(fault)
        print(fault.line(), {name: training.steps(name) for name in training.jobs}, flush=True)
        time.sleep(run.rng.uniform(0.2, 1.0))
    return done


def _difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    if len(found) != len(expected):
        return f"{len(found)} steps, {len(expected)} expected"
    first = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    keys = [k for k in expected[first] if found[first].get(k) != expected[first][k]]
    return f"step {first} differs in {keys}"
