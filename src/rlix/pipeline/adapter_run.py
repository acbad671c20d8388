"""One of many adapters that learn on one model: a job of its own but for the engines, which are borrowed."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rlix.control.client import JobClient
from rlix.engine.train.saving import SaveHandle
from rlix.pipeline.engines import Engines
from rlix.pipeline.holdings import Resident
from rlix.pipeline.jobs.status import JobConfig, JobStatus
from rlix.pipeline.policy import AdapterPolicy
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.trainer import Trainer
from rlix.pipeline.turns import Turns
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.types import Phase


class Owner(Protocol):
    """The job that runs are part of."""

    pipeline_id: str
    client: JobClient
    spec: JobSpec
    engines: Engines
    engine_lock: threading.RLock
    """Whoever has it knows that bytes do not move."""
    turns: Turns
    stop_requested: threading.Event

    @property
    def runs_dir(self) -> Path: ...

    def look_after_base(self) -> None: ...

    def stepped(self, run: "AdapterRun", metrics: Mapping[str, float]) -> None: ...

    def checkpointed(self) -> None: ...


class Borrowed(Engines):
    """Those of the job, which starts and ends them."""

    def __init__(self, owner: Engines) -> None:
        self.actor, self.rollouts, self.served = owner.actor, owner.rollouts, owner.served
        self.model_path, self.start_path = owner.base_path, owner.start_path

    def start(self) -> None: ...

    def serve_base(self) -> None: ...

    def close(self) -> None: ...


class AdapterRun(Trainer):
    """Its own source, schedule, algorithm, adapter, optimizer, steps and run folder; turns on the job's gang."""

    def __init__(self, job: Owner, name: str, spec: JobSpec, *, resume: bool) -> None:
        super().__init__(job.pipeline_id, JobConfig(spec, job.runs_dir / name, resume), job.client)
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

    def make_engines(self) -> Engines:
        return Borrowed(self.job.engines)

    def make_policy(self) -> AdapterPolicy:
        if self.needs.critic is not None or self.needs.teacher is not None:
            raise SpecError("algorithm: has a critic or a teacher, which multi_lora has no place for; use another")
        return AdapterPolicy(self.engines, self.spec, self.adapter, alone=False)

    def save(self, path: Path) -> list[SaveHandle]:
        with self.job.engine_lock:
            return super().save(path)

    def teardown(self) -> None:
        """Leave nothing on the devices; what was learnt is in the run folder."""
        super().teardown()
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

    def _write_lease_events(self) -> None: ...
