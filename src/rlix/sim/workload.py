"""The workload file: a pool, how switching and failing behave there, and the jobs that come. See docs/simulator.md."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Origin, Problem, inconsistent, problems_of, read_yaml
from rlix.protocol.types import Phase

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
NonNegativeCount = Annotated[int, Field(ge=0)]
GangPhase = Literal["actor_training", "critic_training", "old_log_probs", "reference_log_probs", "value_compute"]

SHIPPED, SUBMITTERS = Path(__file__).parent / "workloads", Path(__file__).parent / "submitters"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Pool(_Model):
    gpus: Count
    gpus_per_node: Count = 8


class Switching(_Model):
    """What changing hands costs, in seconds."""

    expand_s: NonNegative = 6.0  # a bundle loads the current weights
    shrink_s: NonNegative = 2.0  # abort, keep tokens, release memory
    sync_s: NonNegative = 1.0  # new weights into a bundle that stayed up
    move_s: NonNegative = 5.0  # a gang's state to devices where it was not before
    heartbeat_s: Positive = 5.0  # how often rollouts report what is outstanding


class Failures(_Model):
    """Device failures: the lease on the device is lost and the device is back at once."""

    mtbf_hours: Positive | None = None  # mean time between failures of one GPU; none: never


class Arrivals(_Model):
    kind: Literal["together", "staggered", "poisson"] = "together"
    load: Positive = 1.0  # poisson: the least work that arrives per second over what the pool can do
    spread_s: NonNegative = 0.0  # staggered: uniformly within this window


class Lengths(_Model):
    """Response lengths in tokens: lognormal, cut at the cap, with an atom there, correlated within a prompt's group."""

    median: Positive
    sigma: NonNegative
    cap: Positive
    cap_share: Share = 0.0
    group_correlation: Share = 0.5

    @model_validator(mode="after")
    def _ordered(self) -> "Lengths":
        if self.median > self.cap:
            raise ValueError(f"median is {self.median:g} and cap {self.cap:g}; give a cap of at least the median")
        return self


class Decode(_Model):
    """Decode speed of one GPU; a bundle of t is faster by t × tp_efficiency^log2(t)."""

    token_ms: Positive = 10.0
    knee: Positive = 96.0
    kv_us: NonNegative = 40.0
    max_batch: Count = 128
    prefill_us: NonNegative = 25.0
    tp_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.9
    prefix_cache: bool = False  # whether a bundle keeps the context of trajectories that wait for a call


class Environment(_Model):
    """Tools and sandboxes of agentic rollouts. Waits are lognormal, each trajectory's and each call's own."""

    tokens_per_turn: Positive = 200.0
    latency_p50_s: Positive = 0.16  # of a call between two turns
    latency_p99_s: Positive = 2.7
    reset_p50_s: NonNegative = 0.0  # of a sandbox that comes up before the first turn; none: there at once
    reset_p99_s: NonNegative = 0.0
    result_tokens: NonNegativeCount = 0  # that a call adds to the context
    failure_rate: Share = 0.0  # trajectories that fail somewhere and start again

    @model_validator(mode="after")
    def _ordered(self) -> "Environment":
        for name in ("latency", "reset"):
            p50_s, p99_s = getattr(self, f"{name}_p50_s"), getattr(self, f"{name}_p99_s")
            if p99_s < p50_s or (p50_s == 0) != (p99_s == 0):
                raise ValueError(
                    f"{name}_p99_s is {p99_s:g} and {name}_p50_s {p50_s:g}; give 0 < p50 <= p99, or no reset"
                )
        return self


class RolloutSpec(_Model):
    trajectories: Count
    lengths: Lengths
    tensor_parallel: Count = 1
    gpus: Count | None = None  # the cluster's size; none: the whole pool
    group: Count = 8
    prompt_tokens: Count = 512
    decode: Decode = Decode()
    environment: Environment | None = None


class GangSpec(_Model):
    phase: GangPhase
    gpus: Count
    seconds: Positive
    jitter: NonNegative = 0.05  # sigma of a lognormal factor per step


class JobSpec(_Model):
    name: str
    count: Count = 1
    steps: Count = 8
    steps_spread: Share = 0.0  # job by job, steps vary by up to this share either way
    rollout: RolloutSpec
    gangs: tuple[GangSpec, ...] = Field(min_length=1)
    gang_placement: Literal["spread", "same"] = "spread"  # blocks in turn, or everyone on the first
    gangs_move: bool = False  # every aligned block of a gang's size is as good as the first
    gangs_least: Count | None = None  # a gang may run on half its devices, a quarter, ... down to so many
    initialization_s: NonNegative = 10.0
    arrives_s: NonNegative | None = None
    departs_after_s: Positive | None = None  # the user stops it this long after arrival


class Workload(_Model):
    name: str
    description: str = ""
    pool: Pool
    switching: Switching = Switching()
    failures: Failures = Failures()
    arrivals: Arrivals = Arrivals()
    jobs: tuple[JobSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> "Workload":
        if problems := list(_problems(self.pool, self.jobs)):
            raise inconsistent(problems)
        return self

    @property
    def job_count(self) -> int:
        return sum(job.count for job in self.jobs)

    def moving(self) -> "Workload":
        """The same jobs, were all their gangs able to run on any aligned block of their size."""
        jobs = tuple(job.model_copy(update={"gangs_move": True}) for job in self.jobs)
        return self.model_copy(update={"name": f"{self.name}-moving", "jobs": jobs})

    def narrowing(self) -> "Workload":
        """The same jobs, were all their gangs able to run on any aligned block of their size or a fraction of it."""
        update = {"gangs_move": True, "gangs_least": 1}
        jobs = tuple(job.model_copy(update=update) for job in self.jobs)
        return self.model_copy(update={"name": f"{self.name}-narrowing", "jobs": jobs})

    def resized(self, gpus: int) -> "Workload":
        """The same jobs on another number of GPUs; raises SpecError when they cannot run there."""
        data = self.model_dump()
        data["pool"] = {"gpus": gpus, "gpus_per_node": min(self.pool.gpus_per_node, gpus)}
        return validated(data, Origin(f"{self.name} on {gpus} GPUs"))


def _problems(pool: Pool, jobs: tuple[JobSpec, ...]) -> Iterator[Problem]:
    if pool.gpus % pool.gpus_per_node and pool.gpus > pool.gpus_per_node:
        yield Problem(
            "pool.gpus",
            f"{pool.gpus} is no multiple of gpus_per_node {pool.gpus_per_node}; use one, or another node",
        )
    names: dict[str, int] = {}
    for number, job in enumerate(jobs):
        if (first := names.setdefault(job.name, number)) != number:
            yield Problem(f"jobs.{number}.name", f"{job.name!r} is also the name of jobs.{first}; rename one")
        yield from _job_problems(f"jobs.{number}", job, pool)


def _job_problems(where: str, job: JobSpec, pool: Pool) -> Iterator[Problem]:
    rollout, size, node = job.rollout, job.rollout.gpus or pool.gpus, pool.gpus_per_node
    if size > pool.gpus:
        yield Problem(f"{where}.rollout.gpus", f"is {size}, and the pool has {pool.gpus}; use at most that")
    if size % rollout.tensor_parallel:
        yield Problem(
            f"{where}.rollout.tensor_parallel", f"{rollout.tensor_parallel} does not divide {size} GPUs; use a divisor"
        )
    elif node % rollout.tensor_parallel and rollout.tensor_parallel % node:
        yield Problem(
            f"{where}.rollout.tensor_parallel",
            f"{rollout.tensor_parallel} does not divide a node of {node} GPUs; use a divisor",
        )
    sizes: dict[str, int] = {}
    for number, gang in enumerate(job.gangs):
        field, cluster = f"{where}.gangs.{number}.gpus", cluster_of(gang.phase)
        if gang.gpus > pool.gpus:
            yield Problem(field, f"is {gang.gpus}, and the pool has {pool.gpus}; use at most that")
        if sizes.setdefault(cluster, gang.gpus) != gang.gpus:
            yield Problem(
                field,
                f"is {gang.gpus}, but an earlier phase runs cluster {cluster!r} on {sizes[cluster]}; give both the "
                "same number",
            )


def cluster_of(phase: str) -> str:
    """The cluster that runs a gang phase."""
    if phase in ("critic_training", "value_compute"):
        return "critic"
    return "reference" if phase == "reference_log_probs" else "actor_train"


def phase_of(name: str) -> Phase:
    return Phase[name.upper()]


def load_workload(source: str | Path) -> Workload:
    """Reads a workload file, or a shipped one by name. Raises SpecError naming the file, the field and the fix."""
    return validated(*read_source(source))


def read_source(source: str | Path) -> tuple[Mapping[str, Any], Origin]:
    """What a file says, or one that is shipped, of jobs or of people who submit. Raises SpecError: there is none."""
    path = Path(source)
    if not path.suffix and not path.exists():
        path = next((folder / f"{source}.yaml" for folder in (SHIPPED, SUBMITTERS) if source in _names(folder)), path)
    if not path.is_file():
        shipped = ", ".join([*_names(SHIPPED), *_names(SUBMITTERS)])
        raise SpecError(f"{source}: there is no such file; give a file or one of: {shipped}")
    return read_yaml(path, "a workload is a mapping of name, pool and jobs, or of name, gpus and users")


def shipped_names() -> list[str]:
    """Of workloads of jobs."""
    return _names(SHIPPED)


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def validated(data: Mapping[str, Any], origin: Origin) -> Workload:
    """Raises SpecError with one line for each mistake."""
    try:
        # JSON mode is strict about types, yet takes a list for a tuple as YAML must.
        return Workload.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise origin.error(problems_of(error.errors(), Workload, data)) from None
