"""`RLIX_HOME/queue.yaml`: teams and rules, which an admin writes. Without it one team has the whole pool."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlix.protocol.spec_file import problems_of, read_yaml
from rlix.scheduler.queue.jobs import Team

FILE = "queue.yaml"
_Count = Annotated[int, Field(ge=0)]
_Hours = Annotated[float, Field(gt=0)]


class TeamSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    guaranteed: _Count = 0
    """Places that the team can always have; lent while it does not use them."""
    maximum: Annotated[int, Field(ge=1)] | None = None
    """The most that it may have at once."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its part of what is guaranteed to nobody, beside those of the others."""

    @model_validator(mode="after")
    def _reachable(self) -> "TeamSpec":
        if self.maximum is not None and self.maximum < self.guaranteed:
            raise ValueError(f"guaranteed {self.guaranteed} is more than maximum {self.maximum}")
        return self


class QueueSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    teams: dict[str, TeamSpec] = Field(default_factory=dict)
    """By name. Without any, `default` has the whole pool."""
    jobs_per_gpu: Annotated[int, Field(ge=1, le=16)] = 1
    """How many jobs' gangs may have a place on one GPU; they take turns there phase by phase."""
    half_life_h: _Hours = 168.0
    """After so many hours what a team was given counts half."""
    most_jobs: Annotated[int, Field(ge=1)] = 1000
    """How many jobs one user may have that have not ended."""
    starved_h: _Hours = 24.0
    """A job that has waited for so long is told of by webhooks as starved."""
    limit_h: _Hours | None = None
    """Time limit of jobs that are submitted without one."""

    def team(self, name: str) -> Team:
        spec = self.teams.get(name, TeamSpec())
        return Team(spec.guaranteed, spec.maximum, spec.weight)


def load_config(path: Path) -> QueueSpec:
    """Raises SpecError with one line for each mistake."""
    if not path.exists():
        return QueueSpec()
    data, origin = read_yaml(path, "the queue's rules are a mapping of keys such as 'teams'")
    try:
        return QueueSpec.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise origin.error(problems_of(error.errors(), QueueSpec, data)) from None
