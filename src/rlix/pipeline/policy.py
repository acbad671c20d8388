"""What a trainer trains: every weight of a model, or an adapter on a model that stays as it is."""

from pathlib import Path
from typing import Any, cast

import torch

from rlix.engine.lora import AdapterConfig
from rlix.engine.train.engine import TrainEngine
from rlix.engine.train.saving import SaveHandle
from rlix.engine.weights.publication import Published, PublishedAdapter
from rlix.pipeline.algorithms.base import Algorithm
from rlix.pipeline.batch import PolicyBatch, over_ranks, tokens_of
from rlix.pipeline.engines import Engines
from rlix.pipeline.models import describe_model
from rlix.pipeline.rollout.adapters import AdapterRollouts
from rlix.pipeline.spec.algorithm import Needs
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.lora import LoraSpec
from rlix.pipeline.spec.sections import Sections


class Policy:
    """Every weight of a model. Its engine is on devices whenever something is asked of it, but for `save`."""

    adapter: str | None = None

    def __init__(self, engines: Engines, spec: JobSpec) -> None:
        self.engines, self.spec = engines, spec

    def rollouts(self) -> Any:
        """What it generates with."""
        return self.engines.rollouts

    def keeps_start(self, needs: Needs) -> bool:
        """Whether the model as reinforcement learning finds it has to be kept."""
        return needs.starting_policy

    def begin(self) -> None:
        """Before a fresh run's first step."""

    def load(self, path: Path) -> None:
        """What `save` wrote."""
        self.engines.actor.load_state(path / "state")
        self.engines.actor.adjust_optimizer(self.spec.optimizer, self.spec.updates)

    def save(self, path: Path) -> list[SaveHandle]:
        """Takes no device: between phases the engine waits in host memory."""
        describe_model(self.engines.model_path, path / "model", self.spec.model.dtype)
        return save_state(self.engines.actor, path / "state", asynchronous=self.spec.checkpoint.asynchronous)

    def score(self, batch: PolicyBatch) -> torch.Tensor:
        """Log-probabilities of its tokens: [samples, length - 1]."""
        return score(self.engines.actor, batch, self.spec.rollout.temperature, self.adapter)

    def train(self, batch: PolicyBatch, denominator: float, algorithm: Algorithm) -> dict[str, float]:
        """One optimizer step on a minibatch."""
        return update(self.engines.actor, self.spec, batch, denominator, algorithm, self.adapter)

    def publish(self, version: int) -> Published:
        """What replicas need of it as it is now."""
        return self.engines.actor.publish(version)


class AdapterPolicy(Policy):
    """One adapter, `name`; only it goes to replicas and to disk. `alone`: on its engines."""

    def __init__(self, engines: Engines, spec: JobSpec, name: str, *, alone: bool) -> None:
        super().__init__(engines, spec)
        self.adapter: str = name
        self._alone = alone

    def rollouts(self) -> Any:
        served = self.engines.served
        return self.engines.rollouts if served is None else AdapterRollouts(served, self.adapter, alone=self._alone)

    def keeps_start(self, needs: Needs) -> bool:
        """It is what the model is to itself, unless that was changed first."""
        return self.spec.warmup is not None or needs.critic is not None

    def begin(self) -> None:
        """A new one, or with the values of the folder that the job names."""
        path = None if self.spec.lora is None else self.spec.lora.path
        self._attach(None if path is None else Path(path), goes_on=False)

    def load(self, path: Path) -> None:
        self._attach(path / "adapter", goes_on=True)

    def save(self, path: Path) -> list[SaveHandle]:
        """The adapter as PEFT has it, with its optimizer's state beside it."""
        self.engines.actor.read("save_adapter", self.adapter, path / "adapter", str(self.engines.base_path))
        return []

    def publish(self, version: int) -> PublishedAdapter:
        return cast(PublishedAdapter, self.engines.actor.read("publish_adapter", self.adapter, version))

    def _attach(self, folder: Path | None, *, goes_on: bool) -> None:
        spec, actor = self.spec, self.engines.actor
        actor.add_adapter(self.adapter, adapter_config(spec.lora), spec.optimizer, spec.updates, spec.seed)
        if folder is not None:
            actor.load_adapter(self.adapter, folder, spec.optimizer, spec.updates, goes_on=goes_on)


def adapter_config(spec: LoraSpec | None) -> AdapterConfig:
    spec = spec or LoraSpec()
    if spec.path is not None:
        return AdapterConfig.of_folder(Path(spec.path))
    alpha = 2.0 * spec.rank if spec.alpha is None else spec.alpha
    return AdapterConfig(spec.rank, alpha, spec.dropout, spec.targets)


def score(engine: TrainEngine, batch: PolicyBatch, temperature: float, adapter: str | None = None) -> torch.Tensor:
    """Log-probabilities of the batch's tokens under an engine's model: [samples, length - 1]."""
    return cast(torch.Tensor, engine.log_probs(over_ranks(tokens_of(batch)), temperature, adapter))


def update(
    engine: TrainEngine,
    spec: Sections,
    batch: PolicyBatch,
    denominator: float,
    algorithm: Algorithm,
    adapter: str | None = None,
) -> dict[str, float]:
    """One optimizer step of an engine's policy on a minibatch."""
    temperature, norm = spec.rollout.temperature, spec.optimizer.max_grad_norm
    found = engine.policy_step(over_ranks(batch), denominator, algorithm, temperature, norm, adapter)
    return cast(dict[str, float], found)


def save_state(engine: TrainEngine, path: Path, *, asynchronous: bool) -> list[SaveHandle]:
    """What goes on writing to the folder beside the next steps, if anything may."""
    if asynchronous:
        return [engine.save_state(path, asynchronous=True)]
    engine.save_state(path)
    return []
