"""From a job that leaves its clusters to a plan to one that says them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from rlix.flow.planner import Mode, Plan, Planned, make_plan
from rlix.flow.profiler.profile import Profile, path_of
from rlix.pipeline.planning.declared import answer_lengths, declared_profile, prompt_tokens
from rlix.pipeline.planning.graph import DEVICE, Fits, job_graph, parts_of
from rlix.pipeline.planning.made import MadePlan, PlannedJob
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.plan import PlanSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.types import ClusterName

FILE = "measured.json"
"""In a run folder, once times had drifted from the plan."""
_TIMED = ("algorithm", "lora", "model", "rollout", "source", "training")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A job with its clusters, what it was planned from, and what else there was. `asked`: as it was."""

    asked: JobSpec
    job: PlannedJob
    planned: Planned
    profile: Profile

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def line(self) -> str:
        """What was chosen, in one line."""
        plan = self.planned.best
        what = f"{self.spec.name}: plan: {plan.mode}: {plan.shape}; {plan.seconds:.3g} s a step"
        return f"{what}, by {'the declared speed' if self.spec.declared_speed else 'its profile'}"

    @property
    def source(self) -> str:
        """What was planned from."""
        if self.spec.declared_speed is None:
            return self.profile.describe()
        mean, longest = fmean(answer_lengths(self.asked)), max(answer_lengths(self.asked))
        return (
            f"{self.spec.name} by the declared speed: prompts of {prompt_tokens(self.asked):g} tokens, answers of "
            f"{mean:.3g}, the longest {longest:g}"
        )


def choose(
    spec: JobSpec,
    ids: Sequence[int],
    home: Path,
    memory: int | None = None,
    measured: Path | None = None,
    *,
    same: Mapping[str, int] = MappingProxyType({}),
) -> Chosen:
    """Plan a job on devices with these ids.

    Args:
        memory: bytes of each; None: not looked at.
        measured: the job's run folder, if it is to go on: where it kept times that had drifted, the plan is by those.
        same: clusters that are to have so many devices.

    Raises:
        SpecError: the job has no profile and no declared speed, or there is no plan.
    """
    wanted = spec.plan or PlanSpec()
    ids = list(ids)[: wanted.gpus]
    if wanted.gpus is not None and len(ids) < wanted.gpus:
        raise SpecError(f"{spec.name}: plan.gpus: asks for {wanted.gpus} devices, and the pool has {len(ids)}")
    ahead = spec.schedule.works_ahead
    profile = _drifted(tables(spec, len(ids), home, ahead=ahead), measured, spec.trajectories_per_step)
    planned = plan_job(spec, profile, len(ids), memory, ahead=ahead, same=same)
    return Chosen(spec, with_clusters(spec, planned.best, ids, profile), planned, profile)


def tables(spec: JobSpec, devices: int, home: Path, *, ahead: bool) -> Profile:
    """What the job's parts cost, were its schedule one that works `ahead` or not.

    Raises:
        SpecError: the job has no declared speed and was not profiled, or not all of it.
    """
    if spec.declared_speed is not None:
        return declared_profile(spec, devices, off_policy=ahead)
    path = profile_path(home, spec)
    command = f"rlix profile {spec.file or spec.name} --gpus {devices}"
    found = Profile.read(path, command)
    if missing := [name for name in parts_of(spec) if name not in found.parts]:
        raise SpecError(f"{path} has no {', '.join(missing)}: run `{command}` again")
    return found


def plan_job(
    spec: JobSpec,
    profile: Profile,
    devices: int,
    memory: int | None = None,
    *,
    ahead: bool,
    same: Mapping[str, int] = MappingProxyType({}),
) -> Planned:
    """Plans by these tables."""
    fits = memory_of(spec, memory)

    def allowed(name: str, count: int) -> bool:
        return same.get(name, count) == count and fits(name, count)

    graph = job_graph(spec, profile, devices, allowed, ahead=ahead)
    mode = None if spec.plan is None or spec.plan.mode == "auto" else Mode(spec.plan.mode)
    return make_plan(graph, spec.trajectories_per_step, devices, device_bytes=DEVICE, mode=mode)


def _drifted(profile: Profile, folder: Path | None, items: int) -> Profile:
    """With times as a run measured them, where it kept some."""
    times = {} if folder is None else measured_in(folder)["times"]
    return profile.scaled(
        {
            name: seconds / profile.parts[name].table.seconds(ranks, items)
            for name, (ranks, seconds) in times.items()
            if name in profile.parts
        }
    )


def measured_in(folder: Path) -> dict[str, Any]:
    """What a run keeps in its folder: `times`, by cluster its ranks and the seconds of its work in a step, once they
    had drifted from the plan; `left`: the plans that it has gone away from."""
    path = folder / FILE
    return {"times": {}, "left": []} | (json.loads(path.read_text()) if path.exists() else {})


def with_clusters(spec: JobSpec, plan: Plan, ids: Sequence[int], profile: Profile) -> PlannedJob:
    """The job with the plan's widths; with its devices only where it matters which."""
    clusters, anywhere = {}, all(part.first == 0 for part in plan.parts)
    for part in plan.parts:
        devices = tuple(ids[part.first : part.first + part.devices])
        own = spec.clusters_in_use[part.name]
        clusters[part.name] = own.on(gpus=part.devices) if anywhere else own.on(devices=devices)
    made = MadePlan(
        wanted=spec.plan or PlanSpec(),
        chosen=f"{plan.mode}: {plan.shape}",
        step_s=plan.seconds,
        load_s=profile.parts[ClusterName.ACTOR_INFER].load_s if plan.switch_s else 0.0,
        seconds={part.name: part.seconds for part in plan.parts},
    )
    placed = {"clusters": spec.clusters.model_copy(update=clusters), "plan": None}
    return PlannedJob(spec.model_copy(update=placed), made)


def unplanned(spec: JobSpec, wanted: PlanSpec | None = None) -> JobSpec:
    """The job as if its clusters had been left to a plan, such as is `wanted`."""
    if spec.is_unplanned:
        return spec
    narrow = {name: c.on() for name, c in spec.clusters.items()}
    section = wanted or PlanSpec()
    return spec.model_copy(update={"clusters": spec.clusters.model_copy(update=narrow), "plan": section})


def memory_of(spec: JobSpec, memory: int | None) -> Fits:
    """By the estimate of `rlix check`, which `rlix run` holds a job to as well."""
    if memory is None:
        return lambda _name, _devices: True
    from rlix.pipeline.memory.job import job_memory, memory_problems
    from rlix.pipeline.memory.shape import shape_of

    shape = shape_of(spec.model)

    def fits(name: str, devices: int) -> bool:
        cluster = spec.clusters_in_use[name].model_copy(update={"gpus": devices})
        tried = spec.model_copy(update={"clusters": spec.clusters.model_copy(update={name: cluster})})
        found = job_memory(tried, shape, memory)
        return not any(problem.field == f"clusters.{name}" for problem in memory_problems(tried, found, memory))

    return fits


def bytes_of(spec: JobSpec, memory: int | None = None) -> dict[str, float]:
    """What each cluster takes of each of its devices at most, by the estimate of `rlix check`."""
    from rlix.pipeline.memory.job import job_memory
    from rlix.pipeline.memory.shape import shape_of

    found: dict[str, float] = {}
    for need in job_memory(spec, shape_of(spec.model), memory).needs:
        found[need.cluster] = max(found.get(need.cluster, 0.0), float(need.total))
    return found


def profile_path(home: Path, spec: JobSpec) -> Path:
    """Tables are kept by machine and by all of a job that decides how long its parts take, which its name does not."""
    values = spec.model_dump(mode="json", include=set(_TIMED))
    units = {name: getattr(cluster, cluster.unit_field) for name, cluster in spec.clusters_in_use.items()}
    text = json.dumps([values, units, spec.schedule.works_ahead], sort_keys=True, default=str)
    return path_of(home, f"job-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}")


def explain(spec: JobSpec, planned: Planned, devices: int, home: Path, memory: int | None = None) -> str:
    """The plan and its runner-up, and what the job's schedule keeps it from, or lets it do."""
    return "\n".join([planned.explain(), *_about_schedule(spec, planned, devices, home, memory)])


def _about_schedule(spec: JobSpec, planned: Planned, devices: int, home: Path, memory: int | None) -> list[str]:
    if spec.schedule.works_ahead:
        return [
            "schedule ahead: the next step's samples are made while a step trains, where they have devices of their "
            "own; being further ahead than one step evens out steps of different length and is not planned for"
        ]
    lines = [
        f"schedule {spec.schedule.name}: a step's samples come from the policy that it trains, so parts only take turns"
    ]
    if spec.schedule.name != "on_policy" or spec.declared_speed is None:
        return lines
    other = plan_job(spec, tables(spec, devices, home, ahead=True), devices, memory, ahead=True)
    if any(segment.ahead for segment in other.best.segments) and other.best.seconds < planned.best.seconds:
        times = planned.best.seconds / other.best.seconds
        lines.append(
            f"with `schedule: ahead`, samples up to a step old, it would be {times:.2f} times as fast: "
            f"{other.best.shape}, {other.best.seconds:.3f} s a step"
        )
    return lines
