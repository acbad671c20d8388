"""The best schedule found for a small case by trying every order of priority among its jobs.

It knows all lengths only through its choice, made afterwards, of the order that did best: an achievable schedule, so
the optimum lies between the lower bounds and it. Factorial in the number of jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from rlix.protocol.errors import SpecError
from rlix.scheduler.plan import Expand
from rlix.scheduler.policies.base import Pool
from rlix.sim.engine import Simulation
from rlix.sim.jobs import Job
from rlix.sim.workload import Workload

_MOST_JOBS = 6


@dataclass(frozen=True, slots=True)
class Ordered:
    """Strict priority among jobs: each in turn may have `widest` bundles, from whoever comes later."""

    order: tuple[str, ...]
    widest: int

    def divide(self, pool: Pool) -> Sequence[Expand]:
        rank = {pipeline_id: place for place, pipeline_id in enumerate(self.order)}
        taken: set[int] = set()
        expands = []
        for rollout in sorted(pool.rollouts, key=lambda r: rank[r.pipeline_id]):
            place = rank[rollout.pipeline_id]
            most = min(self.widest, rollout.demand.trajectories)
            held = [h for h in pool.holdings if pool.rollouts[h.rollout] is rollout]
            keep = [h.bundle for h in held if taken.isdisjoint(h.devices)][:most]
            for bundle in keep:
                taken.update(rollout.bundles[bundle])
            for bundle, devices in enumerate(rollout.bundles):
                if len(keep) >= most:
                    break
                if bundle in keep or not taken.isdisjoint(devices):
                    continue
                if all(d in pool.free or self._later(pool, d, place, rank) for d in devices):
                    taken.update(devices)
                    keep.append(bundle)
                    expands.append(Expand(rollout.pipeline_id, rollout.cluster, bundle))
        return expands

    @staticmethod
    def _later(pool: Pool, device: int, place: int, rank: dict[str, int]) -> bool:
        at = pool.owner.get(device)
        if at is None:
            return False
        holder = pool.rollouts[pool.holdings[at].rollout]
        return not holder.demand.trajectories or rank[holder.pipeline_id] > place


@dataclass(frozen=True, slots=True)
class Best:
    """The smallest makespan, and the job times of the schedule with the smallest mean: maybe another one."""

    makespan_s: float
    mean_job_s: float
    mean_order_job_s: dict[str, float]


def best_known(workload: Workload, jobs: tuple[Job, ...]) -> Best:
    """Raises SpecError when there are too many jobs to try."""
    if len(jobs) > _MOST_JOBS:
        raise SpecError(f"{len(jobs)} jobs have too many orders to try; at most {_MOST_JOBS} can be compared")
    makespan_s, mean_s, job_s = float("inf"), float("inf"), dict[str, float]()
    widths = sorted({1, 2, max(len(job.registration.clusters[0].bundles) for job in jobs)})
    for order in permutations(job.id for job in jobs):
        for widest in widths:
            trace = Simulation(workload, jobs, Ordered(order, widest)).run()
            makespan_s = min(makespan_s, trace.ended_s)
            mean = sum(trace.finished.values()) / len(trace.finished)
            if mean < mean_s:
                mean_s, job_s = mean, trace.finished
    return Best(makespan_s, mean_s, job_s)
