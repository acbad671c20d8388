"""What a job is started with, and what it says of itself while it runs and when it has ended."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlix.node.run_folder import list_checkpoints
from rlix.pipeline.planning.made import MadePlan, PlannedJob
from rlix.pipeline.rollout.shares import Share
from rlix.pipeline.sources.rewards import number

if TYPE_CHECKING:
    from rlix.pipeline.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What a pipeline actor is created with: the job's spec and where and how to run it."""

    spec: "JobSpec"
    run_dir: Path
    resume: bool = False
    why: str = ""  # it is started again, for the job's log
    switches: bool = False  # somebody starts it again by the plan that its summary goes on by
    plan: MadePlan | None = None  # that its clusters are from

    @property
    def job(self) -> PlannedJob:
        return PlannedJob(self.spec, self.plan)

    @staticmethod
    def of(config: "JobConfig | JobSpec") -> "JobConfig":
        """Accept a bare spec too; its run folder is then `runs/<name>` under the current directory."""
        if isinstance(config, JobConfig):
            return config
        return JobConfig(config, Path("runs").absolute() / config.name)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a job is doing now. `state`: starting, running, finished, failed or stopped."""

    name: str
    pipeline_id: str
    state: str
    step: int
    steps: int
    phase: str
    reward: float | None = None
    exact: float | None = None
    tokens_per_s: float | None = None
    evaluation: float | None = None  # the metric that checkpoints are chosen by, when it was last measured
    staleness: float | None = None  # mean age of the last step's tokens in steps, where samples are made ahead
    share: Share | None = None  # of the job's rollouts, where it is an adapter among others
    error: str | None = None
    runs: tuple["JobStatus", ...] = ()  # of a job that trains many adapters
    resumes: int = 0  # how often it was started again because a node had left
    by_pool: bool = False  # why it failed: its nodes left, the control plane ended it, or it could not start there
    moved_to: str | None = None  # where its files are, of one that came to no step: its folder is an earlier run's

    @staticmethod
    def first(config: JobConfig, pipeline_id: str, phase: str = "its process starts") -> "JobStatus":
        """Of a job that has not said anything yet."""
        done = list_checkpoints(config.run_dir / "checkpoints") if config.resume else []
        step = done[-1][0] if done else 0
        return JobStatus(config.spec.name, pipeline_id, "starting", step, config.spec.steps, phase)

    @property
    def progress(self) -> str:
        """How far it is; of a program that attached itself only what it says."""
        return f"{self.step}/{self.steps}" if self.steps else str(self.step or "")


@dataclass(frozen=True, slots=True)
class JobSummary:
    """How a job ended. Rewards are means over a step's trajectories: of the first step and of the last five."""

    name: str
    state: str
    steps: int
    seconds: float
    first_reward: float | None
    last_reward: float | None
    first_exact: float | None
    last_exact: float | None
    run_dir: str
    goes_on: PlannedJob | None = None  # by another plan, from its checkpoint


def as_metrics(found: object, whose: str) -> dict[str, float]:
    """What a step returned. Raises TypeError when it is no metrics with a reward; `whose` names the step."""
    if not isinstance(found, Mapping) or "reward" not in found:
        raise TypeError(f"{whose} returned {found!r}; it must return metrics by name, 'reward' among them")
    return as_numbers(found, whose)


def as_numbers(found: Mapping[str, Any], whose: str) -> dict[str, float]:
    """Metrics as numbers of Python's own, of which JSON can be made. Raises TypeError for what is none."""
    numbers = {name: number(value) for name, value in found.items()}
    if wrong := {name: found[name] for name, value in numbers.items() if value is None}:
        raise TypeError(f"{whose} returned {wrong!r} among its metrics, which must be numbers")
    return {name: value for name, value in numbers.items() if value is not None}
