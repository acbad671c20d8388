"""Many adapters that learn at once on one model: each run is a job of its own but for what it shares."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rlix.control.client import JobClient
from rlix.engine.train.engine import TrainEngine
from rlix.pipeline.adapter_run import AdapterRun
from rlix.pipeline.base import Pipeline
from rlix.pipeline.engines import Engines
from rlix.pipeline.jobs.resume import changed_runs, note_runs, with_changed_runs
from rlix.pipeline.jobs.status import JobConfig, JobStatus
from rlix.pipeline.policy import adapter_config
from rlix.pipeline.rollout.shares import Share
from rlix.pipeline.samples import mean_or_none
from rlix.pipeline.sources.base import Source
from rlix.pipeline.sources.choice import build_source
from rlix.pipeline.sources.surroundings import surroundings
from rlix.pipeline.spec.environment import environment_problems
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.lora import RunSpec
from rlix.pipeline.spec.runs import with_run
from rlix.pipeline.turns import Turns
from rlix.pipeline.warmup import conversations_of, warm_up
from rlix.protocol.errors import NotResidentError, RlixError, SpecError, WaitTimeoutError
from rlix.protocol.messages import Fence
from rlix.protocol.types import ClusterName, Phase

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_LEAVE_S = 60.0  # for a run to end its step when the job ends
_SPARE_ADAPTERS = 4
_OF_THE_JOB = ("reward", "exact", "tokens", "tokens_per_s")


class MultiLora(Pipeline):
    """Owns the model, its engines and the lease; gives the runs their turns and outlives what becomes of each."""

    taught: Source | None = None
    """What the model itself learns from before there is an adapter."""

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

    def make_engines(self) -> Engines:
        """vLLM makes room for adapters when it starts: for some that join later, too."""
        ranks = [adapter_config(run.lora).rank for run in self.spec.run_specs.values()]
        return Engines(self, (len(ranks) + _SPARE_ADAPTERS, max(ranks)))

    def setup(self) -> None:
        note_runs(self.folder.path, self._added, self._removed)
        self.engines = self.make_engines()
        if self.spec.warmup is not None:
            model, name = self.engines.model_path, self.spec.name
            around = surroundings(self.spec, name, model, self.stop_requested, lambda: self.engines.rollouts)
            self.taught = conversations_of(self.spec, around) or build_source(self.spec.source, around)
        self.engines.start()
        self.turns = Turns(self._held)

    def initialize(self) -> None:
        if self.taught is not None:
            warm_up(self, self.engines.actor, self.taught)
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.engines.actor):
            if self.taught is not None:
                self.engines.keep_start()
            self._serve_base()
        self.checkpoints.begin(0, self.save)

    def load(self, path: Path, step: int) -> None:
        self._steps = step
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.engines.actor):
            self._serve_base()

    def step(self, step: int) -> Mapping[str, float]:
        raise NotImplementedError("its runs take steps")

    def evaluate(self, done: int) -> Mapping[str, float]:
        raise NotImplementedError("its runs are evaluated")

    def save(self, path: Path) -> None:
        """The runs keep what they have learnt in folders of their own."""
        (path / "base.txt").write_text(f"{self.engines.base_path}\n")

    def teardown(self) -> None:
        for run in self._all_runs():
            run.request_stop()
        for thread in self._all_threads():
            thread.join(timeout=_LEAVE_S)
        if (turns := getattr(self, "turns", None)) is not None:
            turns.close()
        for part in (self.taught, getattr(self, "engines", None)):
            if part is not None:
                part.close()

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
        rank, (most, highest) = adapter_config(spec.lora).rank, self.engines.adapters or (0, 0)
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

    def _serve_base(self) -> None:
        self.engines.serve_base()
        self._base_of = self.engines.actor.processes

    def look_after_base(self) -> None:
        """Have workers that took the place of others, after a call that failed, publish the model that those had."""
        actor, served = self.engines.actor, self.engines.served
        if served is not None and actor.processes not in ({}, self._base_of):  # {}: there are none any more
            with suppress(NotResidentError):  # they came with nothing
                served.serve_again(actor.publish(0))
            self._base_of = actor.processes

    @contextmanager
    def _held(self, phase: Phase) -> Iterator[None]:
        self._save_progress()
        with self.phase(ClusterName.ACTOR_TRAIN, phase, _OneAtATime(self.engines.actor, self.engine_lock)):
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
