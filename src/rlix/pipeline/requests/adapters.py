"""Adapters of many clients on one model of the pool."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
from safetensors.torch import load_file

from rlix.engine.lora import WEIGHTS_FILE, AdapterConfig
from rlix.engine.weights.publication import PublishedAdapter, publish
from rlix.pipeline.requests.served import ServedModel, together
from rlix.pipeline.rollout.adapters import Served
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.spec.section import Count, Section
from rlix.protocol.types import Phase

_SCORER = "scored"  # name of the adapter under which prompts are scored


class ServedOptions(Section):
    adapters: Count = 16
    """Most adapters that replicas hold at a time; where vLLM serves them, it makes room when it starts."""
    rank: Count = 64
    """The highest rank of an adapter."""


class ServedAdapters(ServedModel):
    """Adapters that are trained one at a time, and sampled together."""

    Options = ServedOptions
    on_adapters = True

    def setup(self) -> None:
        options = cast(ServedOptions, self.options)
        self.adapter_room = options.adapters, options.rank
        super().setup()

    @property
    def served(self) -> Served:
        assert self.engines.served is not None
        return self.engines.served

    def initialize(self) -> None:
        with self.gang(Phase.ACTOR_TRAINING):
            self.engines.serve_base()

    def rebuild(self) -> None:
        super().rebuild()
        with self.gang(Phase.ACTOR_TRAINING):
            self.served.serve_again(self.actor.publish(0))

    # ---- training --------------------------------------------------------------------------------------------

    def add(self, name: str, config: AdapterConfig | None, seed: int) -> None:
        if config is None:
            raise ValueError(f"{name}: every weight of a model that others share cannot be trained")
        self.actor.add_adapter(name, config, self.spec.optimizer, 1, seed)

    def drop(self, name: str) -> None:
        if name in self.actor.adapters():
            self.actor.remove_adapter(name)

    def save_training(self, name: str, folder: Path, *, weights: bool = True, optimizer: bool = True) -> None:
        self.actor.read("save_adapter", name, folder, str(self.engines.base_path))

    def load_training(self, name: str, folder: Path, *, optimizer: bool) -> None:
        self.actor.load_adapter(name, folder, self.spec.optimizer, 1, goes_on=optimizer)
        self.actor.forget_gradients(name)

    def _named(self, name: str | None) -> str | None:
        return name

    # ---- sampling --------------------------------------------------------------------------------------------

    @contextmanager
    def scoring(self, folder: Path | None) -> Iterator[str | None]:
        if folder is None:
            yield None
            return
        self.drop(_SCORER)
        self.add(_SCORER, AdapterConfig.of_folder(folder), 0)
        try:
            self.load_training(_SCORER, folder, optimizer=False)
            yield _SCORER
        finally:
            self.drop(_SCORER)

    def offer(self, name: str, folder: Path, version: int) -> None:
        named = sorted(load_file(folder / WEIGHTS_FILE).items())
        weights = publish(iter(named), version, put=np.array)
        self.served.put(PublishedAdapter(name, AdapterConfig.of_folder(folder), weights))

    def withdraw(self, name: str) -> None:
        self.served.drop(name)

    def generate(self, trajectories: Sequence[Trajectory]) -> "Future[list[Trajectory]]":
        return together(self.served.rollouts.submit(0, trajectories))
