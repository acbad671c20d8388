"""An algorithm whose learners are on the device only under a lease."""

import atexit
import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ray.rllib.algorithms import AlgorithmConfig
from ray.tune.result import TRIAL_INFO

from rlix.control.program import Program, attach
from rlix.control.run_record import Kind, RunRecord
from rlix.integrations.leases import ProgramGate, Stage, Stages
from rlix.integrations.rllib.learners import LearnerSet
from rlix.integrations.rllib.sampling import ElasticSampler, make_elastic
from rlix.protocol.errors import SpecError
from rlix.protocol.types import ClusterName, Phase

C = TypeVar("C", bound=AlgorithmConfig)

_TRAIN, _SAMPLE = ClusterName.ACTOR_TRAIN.value, ClusterName.ACTOR_INFER.value
_INITIALIZATION = Stage("initialization", Phase.INITIALIZATION)
_TRAINING = Stage("actor_training", Phase.ACTOR_TRAINING)
_KIND = Kind("RLlib", {})
_TOUCHING = ("get_state", "set_state", "get_weights", "set_weights", "save_to_path", "restore_from_path",
             "load_module_state", "add_module", "remove_module")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """What `rllib` was called with."""

    name: str
    gpus: int
    elastic: bool
    runs_dir: Path


def rllib(
    config: C, name: str | None = None, *, gpus: int | None = None, elastic: bool = False, runs_dir: str | None = None
) -> C:
    """The same configuration, whose algorithms are jobs of the pool: with `algo.train()` and with Tune.

    Learner updates, and what else reads or writes the learners, hold the lease of a gang; outside it their bytes are in
    host memory. PPO learns the same to the bit, and so does IMPALA with its learner in this process. APPO, and IMPALA
    with remote learners, learn from all batches of a training step before the next one: APPO's circular buffer has then
    nothing of earlier steps, and updates lag less behind the sampling.

    Args:
        name: what people see; default: RLIX_JOB, else the algorithm's name. Tune's trials append their ids.
        gpus: devices of the gang; default: one for each learner.
        elastic: sample with as many environment runners as the job has bundles at the moment. Batches hold at
            least as many steps as without, taken by other runners; episodes may be cut.
        runs_dir: where the run folder goes; default: RLIX_RUNS_DIR, else "runs".

    Raises:
        SpecError: `config` is none, a job's already, or of RLlib's old API; or its learners or runners would have Ray's
            GPUs instead of the pool's.
    """
    if not isinstance(config, AlgorithmConfig):
        raise SpecError(f"rlix.rllib: takes a configuration such as PPOConfig(), not {type(config).__name__}")
    if isinstance(config.algo_class, type) and issubclass(config.algo_class, Leased):
        raise SpecError("rlix.rllib: this configuration is a job's already; call it once, or copy() the plain one")
    if not config.enable_rl_module_and_learner:
        raise SpecError("rlix.rllib: this configuration is of RLlib's old API, which has no learners to lease; leave "
                        "enable_rl_module_and_learner on")  # fmt: skip
    for option in ("num_gpus_per_learner", "num_gpus_per_env_runner"):
        if getattr(config, option):
            raise SpecError(f"rlix.rllib: {option} would take Ray's GPUs beside the pool's: leave it at 0")
    base: Any = config.algo_class
    settings = Settings(
        name or os.environ.get("RLIX_JOB") or base.__name__,
        gpus or max(1, config.num_learners),
        elastic,
        Path(runs_dir or os.environ.get("RLIX_RUNS_DIR") or "runs").absolute(),
    )
    config.algo_class = type(base.__name__, (Leased, base), {"_rlix_settings": settings, "__module__": base.__module__})
    return config


class Leased:
    """Mixed into an algorithm's class."""

    _rlix_settings: Settings

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        trial = config.get(TRIAL_INFO) if isinstance(config, dict) else None  # which the algorithm drops
        self._rlix_trial: str | None = trial and trial.trial_id
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]

    def setup(self, config: Any) -> None:
        self._rlix = Job(self._rlix_settings, self._rlix_trial)
        try:
            self._rlix.start()
            super().setup(config)  # type: ignore[misc]
            self._rlix.attach(self)
        except BaseException as error:  # raised again
            self._rlix.broken(error)
            self._rlix.close()
            raise

    def training_step(self) -> Any:
        try:
            return super().training_step()  # type: ignore[misc]
        finally:
            self._rlix.stages.end()

    def step(self) -> Any:
        try:
            result = super().step()  # type: ignore[misc]
        except BaseException as error:  # raised again
            self._rlix.broken(error)
            raise
        self._rlix.stepped(result)
        return result

    def cleanup(self) -> None:
        try:
            super().cleanup()  # type: ignore[misc]
        finally:
            self._rlix.close()


class Job:
    """One algorithm as a job of the pool. `trial`: Tune's; trials that run at once have run folders of their own."""

    def __init__(self, settings: Settings, trial: str | None) -> None:
        rollouts = {_SAMPLE: None} if settings.elastic else None
        name = f"{settings.name}-{trial}" if trial else settings.name
        self._settings = settings
        self.program: Program = attach(name, gangs={_TRAIN: settings.gpus}, rollouts=rollouts, stay=True)
        self.sampler: ElasticSampler | None = None
        self._steps = 0
        self.broken: Callable[[BaseException], None] = lambda _: None  # see RunRecord
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.program.close)
        atexit.register(self.close)  # of a script that does not stop its algorithm

    def start(self) -> None:
        """It begins with an initialization's lease."""
        self.record = RunRecord(self.program, _KIND, self._settings.runs_dir, _TRAIN)
        self.broken = self.record.broken
        self._closing.callback(self.record.close)
        gate = ProgramGate(self.program)
        self._closing.callback(gate.leave)  # also when the bytes cannot be moved: else the holder is ended with the job
        self.stages = Stages(gate, self.record)
        self._closing.callback(self.stages.end)
        self.stages.begin(_INITIALIZATION)

    def attach(self, algorithm: Any) -> None:
        """The algorithm is built; from here on its learners come and go."""
        group, runners = algorithm.learner_group, algorithm.env_runner_group
        self.learners = LearnerSet(group)
        self.program.name_holders(_TRAIN, self.learners.processes())
        self.stages.add(self.learners)
        self._wrap(group, "update", self._until_synced)
        for method in _TOUCHING:
            if hasattr(group, method):
                self._wrap(group, method, lambda: self.stages.within(_TRAINING, self.learners))
        sync = runners.sync_weights

        @functools.wraps(sync)
        def sync_weights(*args: Any, **kwargs: Any) -> Any:
            found = sync(*args, **kwargs)
            if kwargs.get("from_worker_or_learner_group") is group:
                self.stages.end()
            return found

        runners.sync_weights = sync_weights
        if self._settings.elastic:
            self.sampler = ElasticSampler(self.program, _SAMPLE)
            make_elastic(algorithm, self.sampler)
        self.stages.end()

    def stepped(self, result: Any) -> None:
        runners = result.get("env_runners", {})
        values = {
            "reward": runners.get("episode_return_mean"),
            "tokens": float(runners.get("num_env_steps_sampled", 0)),
        }
        learners = {
            key: float(value)
            for key, value in result.get("learners", {}).get("default_policy", {}).items()
            if isinstance(value, int | float)
        }
        self.record.step(self._steps, {**learners, **values})
        self._steps += 1

    def close(self) -> None:
        """What is held is given back, then it leaves the pool. Calling it again changes nothing."""
        atexit.unregister(self.close)
        self._closing.close()

    def _until_synced(self) -> Any:
        """Held through the update until the runners have the new weights, or the step ends."""
        self.stages.begin(_TRAINING, self.learners)
        return contextlib.nullcontext()

    @staticmethod
    def _wrap(owner: Any, method: str, around: Callable[[], Any]) -> None:
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            with around():
                return inner(*args, **kwargs)

        setattr(owner, method, outer)
