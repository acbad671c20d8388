"""The pipeline that ships in one process: real sources, schedules, algorithms and models; no Ray, no leases."""

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch

from rlix.engine.parallel import NeedParallel
from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.node.run_folder import RunFolder
from rlix.pipeline.engines import Engines
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.trainer import Trainer
from rlix.protocol.messages import Demand


class Generator:
    """Answers at random, from each trajectory's own seed; `holding` keeps what is submitted unanswered until told."""

    def __init__(self, vocabulary: int, end: int) -> None:
        self.version = 0
        self.published: list[int] = []
        self.submitted: list[int] = []
        self.answered: list[tuple[Trajectory, int]] = []
        self.expected = Demand(0, 0)
        self._vocabulary, self._end = vocabulary, end

    def publish(self, version: int) -> None:
        self.version = version
        self.published.append(version)

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]":
        self.submitted.append(step)
        asked: list[Future[Trajectory]] = [Future() for _ in trajectories]
        for done, trajectory in zip(asked, trajectories, strict=True):
            done.set_result(self._answered(trajectory))
        return asked

    @property
    def devices_s(self) -> float:
        return time.monotonic()

    def expect(self, demand: Demand, purpose: str = "", adapter: str = "") -> None:
        self.expected = demand

    def abandon(self, reason: Exception, purpose: str | None = "", adapter: str = "") -> None: ...

    late_s = 0.0

    def slot_use(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...

    def _answered(self, trajectory: Trajectory) -> Trajectory:
        self.answered.append((trajectory, self.version))
        source = Random(trajectory.seed)
        limit = trajectory.sampling.max_new_tokens
        ids = [source.randrange(4, self._vocabulary) for _ in range(source.randint(1, limit))]
        stopped = source.random() < 0.7
        trajectory.token_ids = [*ids[:-1], self._end] if stopped else ids
        trajectory.logprobs = [-2.5 - 0.1 * source.random() for _ in ids]
        trajectory.versions = [self.version] * len(ids)
        trajectory.finish_reason = "stop" if stopped else "length"
        return trajectory


class Engine:
    """A train engine of one rank: calls go to the module."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.module, self._folder = module, folder

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self.module, name)(*(a.value if isinstance(a, NeedParallel) else a for a in args), **kwargs)

        return call

    def publish(self, version: int) -> int:
        return version

    def save(self, path: Path) -> None:
        shutil.copytree(self._folder, path, dirs_exist_ok=True)

    def close(self) -> None: ...


class LocalEngines(Engines):
    """Of one process; what a policy generates is up to the job's `generator`."""

    def start(self) -> None:
        self.actor: Any = self.policy("actor_train", self.model_path)  # type: ignore[arg-type]
        config = self.actor.module.config
        self.rollouts = self._job.generator(int(config.vocab_size), int(config.eos_token_id))  # type: ignore[attr-defined]

    def build(self, name: Any, module: Any, path: Path, optimizer: Any) -> Any:
        return Engine(built_here(module, path, optimizer, self._job.spec), path)


def built_here(module: Any, path: Path, optimizer: Any, spec: JobSpec) -> Any:
    """A module with its weights, in this process."""
    args, kwargs = module.rlix_init
    torch.manual_seed(0)
    made = ModuleSpec(module_class=type(module), args=args, kwargs=kwargs, weights_path=str(path))
    built: Any = build_module(made, torch.device("cpu"), None)
    built.configure_optimizer(optimizer)
    built.declare_speed(spec.speed)
    return built


class InProcess(Trainer):
    generator: type[Generator] = Generator

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        self.spec, self.stop_requested = spec, threading.Event()
        self.folder = RunFolder(folder)
        self.phases: list[str] = []

    def run_steps(self) -> list[dict[str, float]]:
        self.setup()
        try:
            self.initialize()
            return [
                {**self._baseline(step), **self.step(step), **self._evaluated(step + 1)}
                for step in range(self.spec.steps)
            ]
        finally:
            self.teardown()

    @contextmanager
    def phase(self, cluster: str, phase: Any, engine: Any = None, *, stoppable: bool = True) -> Iterator[Any]:
        if stoppable and self.stop_requested.is_set():
            raise InterruptedError("stopped")
        self.phases.append(phase.name)
        yield None

    def _update(self, **changes: object) -> None: ...

    def make_engines(self) -> Engines:
        return LocalEngines(self)
