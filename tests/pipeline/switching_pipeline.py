"""A pipeline that computes nothing, and is told again and again that another plan is better; not all can be had."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlix.pipeline import Pipeline
from rlix.pipeline.planning.made import MadePlan, PlannedJob
from rlix.pipeline.planning.watch import PlanWatch
from rlix.pipeline.spec.clusters import TrainerSpec
from rlix.pipeline.spec.plan import PlanSpec
from rlix.protocol.types import Phase

GPUS = {0.0: 2, 1.0: 64, 2.0: 3}
"""For the trainer, by the reward of a step: 64 the pool has not, and with three `setup` fails."""


class Told(PlanWatch):
    def step(self, metrics: Mapping[str, float], end: float) -> str:
        self.gpus = GPUS.get(metrics["reward"], 0)
        return "it drifts" if self.gpus else ""

    def anew(self, *_: Any) -> PlannedJob | None:
        clusters = self._spec.clusters.model_copy(update={"actor_train": TrainerSpec(gpus=self.gpus)})
        return PlannedJob(self._spec.model_copy(update={"clusters": clusters}), MadePlan(PlanSpec(), f"on {self.gpus}"))


class SwitchingPipeline(Pipeline):
    def setup(self) -> None:
        assert self.config.switches, "its coordinator starts it again"
        if self.spec.clusters.actor_train.count == 3:
            raise MemoryError("three are too many")
        self._plan = Told(self.config.job)

    def step(self, step: int) -> Mapping[str, float]:
        with self.phase("actor_train", Phase.ACTOR_TRAINING) as lease:
            return {"reward": float(step), "devices": float(len(lease.devices))}

    def save(self, path: Path) -> None:
        (path / "saved").touch()
