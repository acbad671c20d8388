"""A job whose clusters were planned: as it runs, and beside it the plan, which is no part of what its user wrote."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlix.pipeline.spec.job import JobSpec
    from rlix.pipeline.spec.plan import PlanSpec

FILE = "plan.json"
"""In a run folder: the plan that the run was started by last."""


@dataclass(frozen=True, slots=True)
class MadePlan:
    """What was chosen; seconds of a step, and of it until rollouts are back on devices that others had; seconds of each
    cluster's work in a step. `wanted`: what was asked for."""

    wanted: "PlanSpec"
    chosen: str
    step_s: float = 0.0
    load_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def stays(self) -> "MadePlan":
        """The same, which the job does not leave by itself."""
        return replace(self, wanted=self.wanted.model_copy(update={"switch": "never"}))

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"wanted": self.wanted.model_dump(mode="json", exclude_none=True)}, indent=2)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job that says all its clusters, and by which plan it has them; None: by its user's word."""

    spec: "JobSpec"
    plan: MadePlan | None = None
