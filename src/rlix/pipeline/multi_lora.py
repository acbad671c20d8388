"""Many adapters that learn at once on one model: each run is a job of its own but for what it shares."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlix.control.client import JobClient
from rlix.engine.train.engine import TrainEngine
from rlix.engine.train.saving import SaveHandle
from rlix.pipeline.holdings import Resident
from rlix.pipeline.jobs.resume import changed_runs, note_runs, with_changed_runs
from rlix.pipeline.jobs.status import JobConfig, JobStatus
from rlix.pipeline.lora_finetune import LoraFinetunePipeline, adapter_config
from rlix.pipeline.rollout.adapters import AdapterRollouts
from rlix.pipeline.rollout.shares import Share
from rlix.pipeline.samples import mean_or_none
from rlix.pipeline.spec.environment import environment_problems
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.lora import LoraSpec, RunSpec
from rlix.pipeline.spec.runs import with_run
from rlix.pipeline.turns import Turns
from rlix.protocol.errors import NotResidentError, RlixError, SpecError, WaitTimeoutError
from rlix.protocol.messages import Fence
from rlix.protocol.types import ClusterName, Phase

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_LEAVE_S = 60.0  # for a run to end its step when the job ends
_SPARE_ADAPTERS = 4
_OF_THE_JOB = ("reward", "exact", "tokens", "tokens_per_s")


class AdapterRun(LoraFinetunePipeline):
    """One run: its own source, schedule, algorithm, adapter, optimizer, steps and run folder; the job's engines."""

    def __init__(self, job: "MultiLoraPipeline", name: str, spec: JobSpec, *, resume: bool) -> None:
        config = JobConfig(spec, job.runs_dir / name, resume)
        super().__init__(job.pipeline_id, config, job.client)
        self.job, self.adapter, self.paused = job, name, False
        self._waited_s = self._had_s = 0.0  # for the gang and with it, in the step under way
        self.log_thread = f"run-{name}"

    @contextmanager
    def phase(
        self, cluster: str, phase: Phase, engine: Resident | None = None, *, stoppable: bool = True
    ) -> Iterator[Any]:
        """A turn on the job's gang."""
        self.note_phase(f"waiting for {phase.name.lower()}")
        asked = time.time()
        try:
            with self.job.turns.turn(self.adapter, phase, self.stop_requested), self.job.engine_lock:
                begin = time.time()
                self._waited_s += begin - asked
                self.note_entered(phase)
                try:
                    yield None
                finally:
                    self._had_s += time.time() - begin
                    self.job.look_after_base()
        except InterruptedError:
            if self.job.stop_requested.is_set():  # its wait for the gang may end before it has told its runs
                self.request_stop()
            raise

    def step(self, step: int) -> dict[str, float]:
        self._waited_s = self._had_s = 0.0
        return {**super().step(step), "gang_s": self._had_s, "gang_wait_s": self._waited_s}

    def status(self) -> JobStatus:
        rollouts = getattr(self, "rollouts", None)
        return replace(self._status, share=None if rollouts is None else rollouts.share)

    @property
    def whole_name(self) -> str:
        return f"{self.job.spec.name}/{self.adapter}"

    def local_model(self) -> Path:
        return self.job.base_path

    def _start_engines(self) -> None:
        self.actor, self.served = self.job.actor, self.job.served
        self.rollouts = AdapterRollouts(self.served, self.adapter, alone=False)

    def initialize(self) -> None:
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING):
            self.attach(self.outside)

    def load(self, path: Path, step: int) -> None:
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING):
            self.attach(path / "adapter", step)

    def save(self, path: Path) -> list[SaveHandle]:
        with self.job.engine_lock:
            return super().save(path)

    def teardown(self) -> None:
        """Leave nothing on the devices; what was learnt is in the run folder."""
        for evaluation in getattr(self, "evaluations", {}).values():
            evaluation.close()
        if (source := getattr(self, "source", None)) is not None:
            source.close()
        if (rollouts := getattr(self, "rollouts", None)) is not None:
            rollouts.leave()
            with (
                suppress(InterruptedError, RlixError),
                self.job.turns.turn(self.adapter, Phase.ACTOR_TRAINING, threading.Event()),
                self.job.engine_lock,
            ):
                if self.adapter in self.actor.adapters():
                    self.actor.remove_adapter(self.adapter)

    def _one_step(self, step: int) -> dict[str, float]:
        metrics = super()._one_step(step)
        self.job.stepped(self, metrics)
        return metrics

    def _note_checkpoint(self, done: int, path: Path) -> None:
        super()._note_checkpoint(done, path)
        self.job.checkpointed()

    def expect_gpu_s(self, left: float) -> None: ...

    def _write_lease_events(self) -> None: ...


class MultiLoraPipeline(LoraFinetunePipeline):
    """Owns the model, its engines and the lease; gives the runs their turns and outlives what becomes of each."""

    @cached_property
    def adapter_room(self) -> tuple[int, int]:  # type: ignore[override]
        """Of vLLM, which makes room when it starts: for some that join later, too."""
        ranks = [adapter_config(run.lora or LoraSpec()).rank for run in self.spec.run_specs.values()]
        return len(ranks) + _SPARE_ADAPTERS, max(ranks)

    def __init__(self, pipeline_id: str, config: JobConfig, client: JobClient | None = None) -> None:
        super().__init__(pipeline_id, config, client)
        self.runs: dict[str, AdapterRun] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._runs_lock, self.engine_lock = threading.RLock(), threading.RLock()
        self._added, self._removed = changed_runs(config.run_dir) if config.resume else ({}, set())
        if config.resume:
            self.spec = with_changed_runs(self.spec, config.run_dir)
        self._steps = 0  # of all runs together
        self._unsaved = False

    # ---- what can be asked for while it runs -----------------------------------------------------------------

    def add(self, name: str, run: RunSpec) -> None:
        """Begin a further run. Raises SpecError when there is one of that name, or it does not fit together."""
        with self._runs_lock:
            if self._status.state != "running":
                raise SpecError(f"{self.spec.name} has not begun its runs yet; try again in a moment")
            if name in self._threads and self._threads[name].is_alive():
                raise SpecError(f"{self.spec.name}: there is a run {name!r} already")
            if name in self.runs and self.runs[name].paused:
                raise SpecError(f"{self.spec.name}: run {name!r} is paused: resume it, or remove it first")
            job = with_run(self.spec, name, run)
            spec = job.run_specs[name]
            if problems := [f"{problem.field}: {problem.message}" for problem in environment_problems(spec)]:
                raise SpecError("\n".join(problems))
            self._check_room(name, spec)
            self._added[name] = run
            self._removed.discard(name)
            self._change_spec(job)
            self._start(name, spec, resume=False)

    def pause(self, name: str) -> None:
        """Have a run write a checkpoint and leave the devices, until `resume`. Raises SpecError when it has ended."""
        run = self._run(name)
        with self._runs_lock:
            if not self._threads[name].is_alive():
                raise SpecError(f"{self.spec.name}: run {name!r} does not train: {_shown(run).phase}")
            if run.stop_requested.is_set():
                raise SpecError(f"{self.spec.name}: run {name!r} was told to pause or end, and ends its step")
            run.paused = True
            run.request_stop()

    def resume(self, name: str) -> None:
        """Go on with a paused run. Raises SpecError when it is not paused, or not yet, or there is no room for it."""
        run = self._run(name)
        with self._runs_lock:
            if not run.paused:
                raise SpecError(f"{self.spec.name}: run {name!r} is not paused: {run.status().phase}")
            if self._threads[name].is_alive():
                raise SpecError(f"{self.spec.name}: run {name!r} ends its step before it pauses; try again in a moment")
            self._check_room(name, run.spec)
            self._start(name, run.spec, resume=True)

    def remove(self, name: str) -> None:
        """End a run; its folder stays."""
        run = self._run(name)
        with self._runs_lock:
            run.paused = False
            run.request_stop()
            self._added.pop(name, None)
            self._removed.add(name)
            left = {other: spec for other, spec in self.spec.runs.items() if other != name}
            self._change_spec(self.spec.model_copy(update={"runs": left}))

    def _change_spec(self, spec: JobSpec) -> None:
        self.spec = spec
        self.folder.write_spec(spec.to_yaml())
        note_runs(self.folder.path, self._added, self._removed)

    def status(self) -> JobStatus:
        """Of all runs together, and of each."""
        runs = tuple(_shown(run) for run in self._all_runs())
        rewards = [run.reward for run in runs if run.reward is not None]
        shares = [run.share for run in runs if run.share is not None]
        return replace(
            self._status,
            runs=runs,
            step=sum(run.step for run in runs),
            steps=sum(run.steps for run in runs) or self.spec.steps,
            reward=mean_or_none(rewards),
            share=Share(sum(s.to_come for s in shares), sum(s.in_flight for s in shares)),
        )

    def hang(self) -> WaitTimeoutError | None:
        served = self.turns.served if hasattr(self, "turns") else None
        if served is None:
            return super().hang()
        return self.holdings.hang(f"{self.spec.name}: run {served.run!r}", served.thread)

    # ---- its life --------------------------------------------------------------------------------------------

    def setup(self) -> None:
        note_runs(self.folder.path, self._added, self._removed)
        self.reference = self.critic = None
        self.model_path = self.local_model()
        if self.spec.warmup is not None:
            self.build_source()
        self._start_engines()
        self.turns = Turns(self._held)

    def initialize(self) -> None:
        self.warm_up()
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            if self.spec.warmup is not None:
                self.actor.save(self.reference_path)
            self.serve_base()
        self.checkpoints.begin(0, self.save)

    def load(self, path: Path, step: int) -> None:
        self._steps = step
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            self.serve_base()

    def save(self, path: Path) -> list[SaveHandle]:
        """The runs keep what they have learnt in folders of their own."""
        (path / "base.txt").write_text(f"{self.base_path}\n")
        return []

    def teardown(self) -> None:
        for run in self._all_runs():
            run.request_stop()
        for thread in self._all_threads():
            thread.join(timeout=_LEAVE_S)
        if (turns := getattr(self, "turns", None)) is not None:
            turns.close()
        super().teardown()

    def _train(self, first: int) -> str:
        self._event("job", event="first_step", detail=None)
        with self._runs_lock:
            self._update(state="running", phase="runs")
            for name, spec in self.spec.run_specs.items():
                self._start(name, spec, resume=self.config.resume)
        while self._any_left():
            if self.stop_requested.wait(_LOOK_S):
                for run in self._all_runs():
                    run.paused = False
                    run.request_stop()
                for thread in self._all_threads():
                    thread.join(_LOOK_S)
            self._write_lease_events()
        self._save_progress()
        runs = self._all_runs()
        failed = {run.adapter: status.error for run in runs if (status := run.status()).state == "failed"}
        if failed:
            text = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise RlixError(f"{len(failed)} of {len(runs)} runs failed, the others have ended: {text}")
        return "stopped" if self.stop_requested.is_set() else "finished"

    def _all_runs(self) -> list[AdapterRun]:
        """Also while others join."""
        with self._runs_lock:
            return list(self.runs.values())

    def _all_threads(self) -> list[threading.Thread]:
        with self._runs_lock:
            return list(self._threads.values())

    def _any_left(self) -> bool:
        """Whether one trains, or will go on when it is told to: not one that ended before it could pause."""
        with self._runs_lock:
            if any(thread.is_alive() for thread in self._threads.values()):
                return True
            return any(run.paused and run.status().state == "stopped" for run in self.runs.values())

    @property
    def runs_dir(self) -> Path:
        return self.folder.path / "runs"

    # ---- runs ------------------------------------------------------------------------------------------------

    def _start(self, name: str, spec: JobSpec, *, resume: bool) -> None:
        run = AdapterRun(self, name, spec, resume=resume)
        thread = threading.Thread(target=self._live, args=(run,), name=run.log_thread, daemon=True)
        with self._runs_lock:
            self.runs[name], self._threads[name] = run, thread
            thread.start()

    def _live(self, run: AdapterRun) -> None:
        try:
            run.run()
        except Exception:  # noqa: BLE001 - whatever a run raises, the others go on; its own log has all of it
            logger.warning("%s: run %s failed: %s", self.spec.name, run.adapter, run.status().error)

    def _check_room(self, name: str, spec: JobSpec) -> None:
        """Where replicas made room when they started."""
        rank, (most, highest) = adapter_config(spec.lora or LoraSpec()).rank, self.adapter_room
        going = sum(thread.is_alive() for thread in self._threads.values())
        if spec.rollout.executor == "vllm" and (rank > highest or going >= most):
            raise SpecError(
                f"{self.spec.name}: vLLM was started for {most} adapters of rank {highest} at most; {name!r} has rank "
                f"{rank}, beside {going} others"
            )

    def _run(self, name: str) -> AdapterRun:
        if name not in self.runs:
            raise SpecError(f"{self.spec.name}: there is no run {name!r}; there are {sorted(self.runs)}")
        return self.runs[name]

    def stepped(self, run: AdapterRun, metrics: Mapping[str, float]) -> None:
        """A run has taken a step: a row in the job's own metrics."""
        with self._runs_lock:
            row = {"step": self._steps, "time": time.time(), "run": run.adapter, "run_step": run.status().step - 1}
            self.folder.metrics(row | {name: metrics[name] for name in _OF_THE_JOB if name in metrics})
            self._steps += 1

    def checkpointed(self) -> None:
        """A run has written a checkpoint: what resumes the job should know how far all are."""
        self._unsaved = True

    def _save_progress(self) -> None:
        """Only the thread that holds the gang may, or whoever knows that there is none."""
        with self._runs_lock:
            if self._unsaved and not (self.folder.checkpoints / f"step_{self._steps}").exists():
                self.checkpoints.begin(self._steps, self.save)
            self._unsaved = False

    # ---- the gang --------------------------------------------------------------------------------------------

    def serve_base(self) -> None:
        super().serve_base()
        self._base_of = self.actor.processes

    def look_after_base(self) -> None:
        """Have workers that took the place of others, after a call that failed, publish the model that those had."""
        if self.actor.processes not in ({}, self._base_of):  # {}: there are none any more
            with suppress(NotResidentError):  # they came with nothing
                self.served.serve_again(self.actor.publish(0))
            self._base_of = self.actor.processes

    @contextmanager
    def _held(self, phase: Phase) -> Iterator[None]:
        self._save_progress()
        with self.phase(ClusterName.ACTOR_TRAIN, phase, _OneAtATime(self.actor, self.engine_lock)):
            yield


def _shown(run: AdapterRun) -> JobStatus:
    """A paused run's own word for what it is differs: to itself it was stopped."""
    status = run.status()
    return replace(status, phase="paused") if run.paused and status.state == "stopped" else status


class _OneAtATime:
    """An engine whose bytes do not move while a run reads them."""

    def __init__(self, engine: TrainEngine, lock: threading.RLock) -> None:
        self._engine, self._lock = engine, lock

    @property
    def idle_s(self) -> float:
        return self._engine.idle_s

    def acquire(self, lease: Fence) -> object:
        with self._lock:
            return self._engine.acquire(lease)

    def release(self, epoch: int) -> object:
        with self._lock:
            return self._engine.release(epoch)
