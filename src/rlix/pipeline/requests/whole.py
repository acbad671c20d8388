"""All of a model on the pool: trained for one client, or serving what clients have saved, one folder at a time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlix.engine.lora import AdapterConfig
from rlix.engine.train.materialize import Checkpoint
from rlix.engine.weights.publication import PublishedWeights, publish
from rlix.pipeline.requests.module import AdamStep
from rlix.pipeline.requests.served import ServedModel, together
from rlix.pipeline.requests.turns import Turns
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.training.policy import policy_on_meta

STATE = "training_state"
"""Folder of a saved model that training goes on from; beside it the weights are, as transformers loads them."""


class ServedWhole(ServedModel):
    """Its engine holds one client's model at a time, and its replicas those weights that were asked for first.

    Replicas change to other weights when all that was asked of the ones before is generated.
    """

    def setup(self) -> None:
        self._offered: dict[str, Path] = {}
        self._turns: Turns[Path, list[Trajectory]] = Turns(self._serve)
        self._versions = 0
        super().setup()
        self._held: Path | None = self.model_path  # the folder whose weights the engine has; None: those of no folder

    def initialize(self) -> None:
        """Nothing is on the replicas until somebody samples."""

    def teardown(self) -> None:
        if (turns := getattr(self, "_turns", None)) is not None:
            turns.close()
        super().teardown()

    def rebuild(self) -> None:
        super().rebuild()
        self._held = self.model_path

    # ---- training --------------------------------------------------------------------------------------------

    def add(self, name: str, config: AdapterConfig | None, seed: int) -> None:
        self._take(self.model_path)

    def drop(self, name: str) -> None:
        """Whatever comes next takes its place."""

    def take_step(self, name: str, adam: AdamStep) -> dict[str, float]:
        self._held = None
        return super().take_step(name, adam)

    def save_training(self, name: str, folder: Path, *, weights: bool = True, optimizer: bool = True) -> None:
        if weights:
            self.actor.save(folder)
        if optimizer:
            self.actor.save_state(folder / STATE)

    def load_training(self, name: str, folder: Path, *, optimizer: bool) -> None:
        if optimizer and (folder / STATE).is_dir():
            self._held = None
            self.actor.load_state(folder / STATE)
        else:
            self._take(folder)

    def _take(self, folder: Path) -> None:
        """The weights in a folder, and an optimizer that has seen nothing."""
        if self._held != folder:
            self._held = None
            self.actor.load(folder)
            self._held = folder
        self.actor.begin_anew()

    def _named(self, name: str | None) -> str | None:
        return None

    # ---- sampling --------------------------------------------------------------------------------------------

    @contextmanager
    def scoring(self, folder: Path | None) -> Iterator[str | None]:
        self._take(folder or self.model_path)
        yield None

    def offer(self, name: str, folder: Path, version: int) -> None:
        self._offered[name] = folder

    def withdraw(self, name: str) -> None:
        self._offered.pop(name, None)

    def generate(self, trajectories: Sequence[Trajectory]) -> "Future[list[Trajectory]]":
        name = trajectories[0].adapter
        folder = self._offered[name] if name else self.model_path
        own = [replace(each, adapter="") for each in trajectories]
        return self._turns.ask(folder, lambda: together(self.rollouts.submit(0, own)))

    def _serve(self, folder: Path) -> None:
        self._versions += 1
        self.rollouts.publish(published(folder, self.model_path, self._versions, self.spec.model.dtype))


def published(
    folder: Path, model: Path, version: int, dtype: str, put: Callable[[Any], Any] | None = None
) -> PublishedWeights:
    """The weights in a folder, by the names that a trainer of the model gives them; parameters in `dtype`.

    `put`: as of `publish`.

    Raises WeightSyncError: they are not the model's. OSError, SafetensorError: they cannot be read.
    """
    module = policy_on_meta(model)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    stored = Checkpoint.in_folder(folder, module)
    kind: torch.dtype = getattr(torch, dtype)

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stored.tensors():
            yield name, tensor.to(kind) if name in parameters and tensor.is_floating_point() else tensor

    return publish(named(), version, aliases=stored.aliases, put=put)
