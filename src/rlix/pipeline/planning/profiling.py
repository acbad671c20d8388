"""What the parts of a job cost here: a few steps of the job itself for each width, and its own record of them.

Everything in turn on the same devices, so that each part is alone and rollouts come and go.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rlix.flow.planner import Point
from rlix.flow.profiler.profile import PartProfile, Profile
from rlix.monitor.records import RunRecord, Span
from rlix.pipeline.planning.graph import parts_of, widths_of
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.schedule import ScheduleSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.types import ClusterName

SIZES = "rlix.pipeline.schedules.sizes:Sizes"
_NAME_LENGTH = 50


@dataclass(frozen=True, slots=True)
class Trial:
    """A short run of the job, of which every cluster has `width` ranks."""

    spec: JobSpec
    width: int


def trials(spec: JobSpec, devices: int, widths: Sequence[int], prompts: Sequence[int], repeats: int) -> list[Trial]:
    """One for each width that all clusters can have and that the devices allow.

    Args:
        prompts: of the steps; each size `repeats` times, after a first step that does not count.

    Raises:
        SpecError: none of the widths is one.
    """
    found = []
    for width in widths:
        sizes = [size for size in prompts if _divides(spec, width, size)]
        if sizes and all(width in widths_of(spec, name, devices) for name in parts_of(spec)):
            found.append(Trial(_trial(spec, width, [sizes[-1], *sizes * repeats]), width))
    if not found:
        raise SpecError(
            f"profile: {spec.name} runs on none of {list(widths)} rank(s) of {devices} device(s) with {list(prompts)} "
            f"prompts: {spec.trajectories_per_step} samples must divide among them"
        )
    return found


def _trial(spec: JobSpec, width: int, sizes: Sequence[int]) -> JobSpec:
    clusters = {name: cluster.on(gpus=width * cluster.unit) for name, cluster in spec.clusters_in_use.items()}
    cap = spec.algorithm.cap(spec.schedule.works_ahead)  # as the job weighs its samples, though here none is older
    changed = {
        "name": f"profile-{spec.name[:_NAME_LENGTH]}-{width}",
        "steps": len(sizes),
        "schedule": ScheduleSpec(name=SIZES, options={"prompts": list(sizes)}),
        "algorithm": spec.algorithm.model_copy(update={"importance_cap": cap, "resample_rounds": 0}),
        "evaluation": None,
        "checkpoint": spec.checkpoint.model_copy(update={"every": len(sizes) + 1}),
        "plan": None,
        "clusters": spec.clusters.model_copy(update=clusters),
    }
    return spec.model_copy(update=changed)


def _divides(spec: JobSpec, width: int, prompts: int) -> bool:
    widest = max(cluster.unit for cluster in spec.clusters_in_use.values())
    return prompts * spec.rollout.samples_per_prompt % (width * widest * spec.algorithm.minibatches) == 0


def measured(spec: JobSpec, runs: Sequence[tuple[int, RunRecord]], machine: str) -> Profile:
    """Tables from trials' records, each with its width.

    Raises:
        SpecError: a part was not measured.
    """
    parts = {}
    for name in parts_of(spec):
        points: list[Point] = []
        moves: list[Span] = []
        for width, record in runs:
            spans = [span for span in record.spans if span.cluster == name]
            moves += spans
            points += (
                _rollouts(width, record, spans) if name == ClusterName.ACTOR_INFER else _phases(width, record, spans)
            )
        if not points:
            raise SpecError(f"profile: no step of {spec.name} had work of {name}")
        load_s, offload_s = _longest(moves, "load"), _longest(moves, "offload")
        own = (load_s, offload_s) if name == ClusterName.ACTOR_INFER else (0.0, 0.0)  # others' are part of each phase
        parts[name] = PartProfile(tuple(points), *own)
    return Profile(spec.name, machine, parts)


def _phases(width: int, record: RunRecord, spans: Sequence[Span]) -> Iterator[Point]:
    """Of a cluster that works in phases: of all in a step, engines' coming and going included."""
    seconds: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # by step and device
    for span in spans:
        seconds[span.step][span.device] += span.end - span.start
    for row in record.metrics[1:]:
        by_device = seconds.get(int(row["step"]))
        if by_device:
            yield Point(width, int(row["trajectories"]), max(by_device.values()))


def _rollouts(width: int, record: RunRecord, spans: Sequence[Span]) -> Iterator[Point]:
    """Of a step's generation, from when replicas were there."""
    load_s = _longest(spans, "load")
    for row in record.metrics[1:]:
        whole = row["rollout_s"]
        yield Point(width, int(row["trajectories"]), max(whole - load_s, whole / 10))


def _longest(spans: Sequence[Span], kind: str) -> float:
    """The median over steps of the longest; 0: there was none."""
    by_step: dict[int, float] = {}
    for span in spans:
        if span.kind == kind:
            by_step[span.step] = max(by_step.get(span.step, 0.0), span.end - span.start)
    return median(by_step.values()) if by_step else 0.0
