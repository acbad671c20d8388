"""What no schedule can beat: lower bounds on the makespan, and on each job's time.

- fluid: all tokens at the most efficient batch and all gangs, spread evenly over every GPU (work conservation).
- tight: the same with each rollout decoded on one bundle, the width that spends the fewest GPU-seconds on it: widening
  never shortens a decode step in proportion, because the weights are streamed once per bundle whatever its batch.
- critical path: a job's own chain of steps on its full declared width with nobody in the way.
- pinned: gangs that share a device exclude each other, and what must run inside a set of devices fills it; gangs that
  may run elsewhere do not count.

The first three hold for every policy; pinned only for those that leave the declared devices as they are.
"""

from dataclasses import dataclass
from itertools import groupby

from rlix.protocol.types import ClusterName
from rlix.sim.jobs import Job


@dataclass(frozen=True, slots=True)
class JobWork:
    """GPU-seconds and the shortest time of one job that runs to its end."""

    tight_gpu_s: float
    fluid_gpu_s: float
    critical_s: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds from the start of the run to its end, at least."""

    fluid_s: float
    tight_s: float
    critical_s: float
    pinned_s: float
    work: dict[str, JobWork]

    def makespan_s(self, *, pinned: bool) -> float:
        return max(self.fluid_s, self.tight_s, self.critical_s, self.pinned_s if pinned else 0.0)


def bounds(jobs: tuple[Job, ...], gpus: int) -> Bounds:
    """Bounds for jobs that run to their end; those that depart early are left out."""
    staying = [job for job in jobs if job.departs_s == float("inf")]
    work = {job.id: _work(job) for job in staying}
    arrivals = {job.id: job.arrives_s for job in staying}
    return Bounds(
        fluid_s=_filled({i: w.fluid_gpu_s for i, w in work.items()}, arrivals, gpus),
        tight_s=_filled({i: w.tight_gpu_s for i, w in work.items()}, arrivals, gpus),
        critical_s=max((job.arrives_s + work[job.id].critical_s for job in staying), default=0.0),
        pinned_s=_pinned(staying),
        work=work,
    )


def _work(job: Job) -> JobWork:
    train = job.registration.cluster(ClusterName.ACTOR_TRAIN)
    width = len(job.registration.cluster(ClusterName.ACTOR_INFER).bundles)
    initialization = job.spec.initialization_s
    tight = fluid = initialization * len(train.devices)
    critical = initialization
    for number in range(job.steps):
        step = job.step(number)
        tight += step.tight_gpu_s
        fluid += step.fluid_gpu_s
        critical += step.work.shortest_s(width) + sum(gang.seconds for gang in step.gangs)
    return JobWork(tight, fluid, critical)


def _filled(work: dict[str, float], arrivals: dict[str, float], gpus: int) -> float:
    """Whatever arrives from some moment on takes at least its work over the pool's width from then."""
    latest = 0.0
    outstanding = 0.0
    for arrives, group in groupby(sorted(work, key=lambda i: -arrivals[i]), key=lambda i: arrivals[i]):
        outstanding += sum(work[i] for i in group)
        latest = max(latest, arrives + outstanding / gpus)
    return latest


def _pinned(jobs: list[Job]) -> float:
    if not jobs:
        return 0.0
    start = min(job.arrives_s for job in jobs)
    gang_s: dict[int, float] = {}
    inside: list[tuple[frozenset[int], float]] = []  # where some work must run, GPU-seconds
    for job in jobs:
        devices = {cluster.name: cluster.devices for cluster in job.registration.clusters}
        seconds = dict.fromkeys(devices, 0.0)
        seconds[ClusterName.ACTOR_TRAIN] += job.spec.initialization_s
        tight = 0.0
        for number in range(job.steps):
            step = job.step(number)
            tight += step.work.total.tight_gpu_s
            for gang in step.gangs:
                seconds[gang.cluster] += gang.seconds
        movable = {cluster.name for cluster in job.registration.clusters if cluster.alternatives}
        for name, total in seconds.items():
            if name in movable:
                continue
            for device in devices[name]:
                gang_s[device] = gang_s.get(device, 0.0) + total
            inside.append((frozenset(devices[name]), total * len(devices[name])))
        inside.append((frozenset(devices[ClusterName.ACTOR_INFER]), tight))
    filled = max(
        sum(gpu_s for devices, gpu_s in inside if devices <= place) / len(place) for place in {p for p, _ in inside}
    )
    return start + max(filled, *gang_s.values())
