"""Whether a planned job's steps take the time that its plan says, and by which plan they would take less."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlix.flow.programs.drift import LIMIT, Drift
from rlix.pipeline.jobs.run_folder import replace_file
from rlix.pipeline.planning.choose import FILE, choose, unplanned
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.types import ClusterName

logger = logging.getLogger(__name__)

STEP = "step"
WORTH = 0.05
"""Another plan must be so much faster than the steps as they are to be worth a word."""


class PlanWatch:
    """Of a job that was planned; of another it sees nothing. One thread."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        plan = spec.plan if spec.plan is not None and not spec.plan.open else None
        self._planned = {} if plan is None else {STEP: plan.step_s, **plan.seconds}
        if plan is not None and ClusterName.ACTOR_INFER in self._planned:
            self._planned[ClusterName.ACTOR_INFER] += plan.load_s
        self._drift = _drift(self._planned)
        self._phases: dict[str, float] = {}
        self._ratios: dict[str, float] = {}
        self._named = ""  # the plan that was said to be better

    def phase(self, cluster: str, seconds: float) -> None:
        """A cluster had its devices for so long, its engine's coming and going included."""
        self._phases[cluster] = self._phases.get(cluster, 0.0) + seconds

    def step(self, metrics: Mapping[str, float]) -> str:
        """A step has ended: says by how much times have drifted, when they have for some steps in a row."""
        if not self._planned:
            return ""
        seen = {**self._phases, STEP: metrics["step_s"]}
        self._phases = {}
        if not self._spec.schedule.works_ahead and "rollout_s" in metrics:  # ahead, it ends when somebody asks
            seen[ClusterName.ACTOR_INFER] = metrics["rollout_s"]
        self._drift.saw({name: [(1, seconds)] for name, seconds in seen.items() if name in self._planned})
        if not (factors := self._drift.factors()):
            return ""
        now = {name: self._planned[name] * factors.get(name, 1.0) for name in self._planned}
        off = {name: ratio for name, ratio in factors.items() if name != STEP and abs(ratio - 1) > LIMIT}
        parts = ", ".join(f"{name} {ratio:.2f} times its time" for name, ratio in off.items())
        said = f"steps take {now[STEP]:.3g} s, planned were {self._planned[STEP]:.3g} s: {parts or 'none of the parts'}"
        self._ratios = {name: self._ratios.get(name, 1.0) * ratio for name, ratio in factors.items()}
        self._planned, self._drift = now, _drift(now)
        return said

    @property
    def drifted(self) -> bool:
        return bool(self._ratios)

    def at_checkpoint(self, folder: Path, ids: Sequence[int], home: Path) -> str:
        """Once times have drifted: keeps them for a plan to come, and says what it would be if that is worth it."""
        plan, clusters = self._spec.plan, self._spec.clusters_in_use
        assert plan is not None
        kept = {
            name: [(clusters[name].count or 0) // clusters[name].tensor_parallel, seconds * self._ratios.get(name, 1.0)]
            for name, seconds in plan.seconds.items()
        }
        replace_file(folder / FILE, json.dumps(kept).encode())
        try:
            other = choose(unplanned(self._spec), ids, home, measured=folder).planned.best
        except SpecError as error:
            logger.info("%s: is not planned anew: %s", self._spec.name, error)
            return ""
        shape, present = f"{other.mode}: {other.shape}", self._planned[STEP]
        if shape in (plan.chosen, self._named) or other.seconds > present * (1 - WORTH):
            return ""
        self._named = shape
        return (
            f"by these times another plan would take {other.seconds:.3g} s a step: {shape}; stop "
            "the job and go on with `rlix run --resume` to have it"
        )


def _drift(planned: Mapping[str, float]) -> Drift:
    return Drift({name: (seconds, 1) for name, seconds in planned.items()})
