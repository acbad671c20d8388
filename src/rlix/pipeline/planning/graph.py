"""A job's step as the planner sees it: its clusters in the order in which they work, and what each may run on.

An item is a trajectory. A step's trajectories are learnt from together, so they are never cut into chunks: what works
beside what is a matter of the schedule, which says whether the next step's are made meanwhile.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from rlix.flow.planner import Component, Edge, Graph, Table
from rlix.flow.profiler.profile import Profile
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.types import ClusterName

ORDER = (ClusterName.ACTOR_INFER, ClusterName.REFERENCE, ClusterName.CRITIC, ClusterName.ACTOR_TRAIN)
DEVICE = 1.0
"""Bytes of a device and of every state, to the planner: a lease is of whole devices, so no two states share one. What
does not fit by itself is no width to choose."""

Fits = Callable[[str, int], bool]
"""Whether a cluster's work fits on each of so many devices."""


def parts_of(spec: JobSpec) -> list[str]:
    """The job's clusters, in the order of a step."""
    return [name.value for name in ORDER if name in spec.clusters_in_use]


def job_graph(spec: JobSpec, profile: Profile, devices: int, fits: Fits, *, ahead: bool) -> Graph:
    """Raises SpecError: a part runs on no number of these devices."""
    names = parts_of(spec)
    components = [_component(spec, profile, name, devices, fits) for name in names]
    edges = [Edge(a, b, ahead=ahead and a == ClusterName.ACTOR_INFER) for a, b in pairwise(names)]
    return Graph(components, edges)


def _component(spec: JobSpec, profile: Profile, name: str, devices: int, fits: Fits) -> Component:
    known, unit = profile.parts[name], spec.clusters_in_use[name].unit
    widths = widths_of(spec, name, devices)
    roomy = tuple(width for width in widths if fits(name, width * unit))
    if not roomy:
        why = f"too little memory on {widths[-1] * unit}" if widths else _indivisible(spec, name)
        raise SpecError(f"plan: {name} runs on no part of {devices} device(s): {why}")
    table = Table([replace(point, peak_bytes=DEVICE, resident_bytes=DEVICE) for point in known.points])
    return Component(
        name,
        table,
        unit=unit,
        widths=roomy,
        load_s=known.load_s,
        offload_s=known.offload_s,
        chunk=spec.trajectories_per_step,
    )


def widths_of(spec: JobSpec, name: str, devices: int) -> tuple[int, ...]:
    """Numbers of ranks, each of `unit` devices, among which a cluster's batches divide."""
    unit = spec.clusters_in_use[name].unit
    ranks = range(1, devices // unit + 1)
    if name == ClusterName.ACTOR_INFER:
        return tuple(ranks)
    parts = 1 if name == ClusterName.REFERENCE else spec.algorithm.minibatches
    warmup = spec.warmup.batch_size if spec.warmup is not None and name == ClusterName.ACTOR_TRAIN else 0
    total = spec.trajectories_per_step
    return tuple(n for n in ranks if total % (n * unit * parts) == 0 and warmup % (n * unit) == 0)


def _indivisible(spec: JobSpec, name: str) -> str:
    cluster = spec.clusters_in_use[name]
    total, parts = spec.trajectories_per_step, spec.algorithm.minibatches
    unit = f"its {cluster.unit_field} is {cluster.unit}"
    return f"{unit}, and {total} samples in {parts} minibatches must divide among its devices"
