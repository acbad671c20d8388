"""A pipeline that computes nothing, and is told after its second step that another plan is better."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlix.pipeline import Pipeline
from rlix.pipeline.planning.watch import PlanWatch
from rlix.pipeline.spec.clusters import ClusterSpec
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.plan import PlanSpec
from rlix.protocol.types import Phase


class Told(PlanWatch):
    def step(self, metrics: Mapping[str, float], end: float) -> str:
        return "it drifts" if metrics["reward"] == 1.0 else ""

    def anew(self, *_: Any) -> JobSpec | None:
        clusters = self._spec.clusters.model_copy(update={"actor_train": ClusterSpec(gpus=2)})
        return self._spec.model_copy(update={"clusters": clusters, "plan": PlanSpec(chosen="wider")})


class SwitchingPipeline(Pipeline):
    def setup(self) -> None:
        self._plan = Told(self.spec)

    def step(self, step: int) -> Mapping[str, float]:
        with self.phase("actor_train", Phase.ACTOR_TRAINING) as lease:
            return {"reward": float(step), "devices": float(len(lease.devices))}

    def save(self, path: Path) -> None:
        (path / "saved").touch()
