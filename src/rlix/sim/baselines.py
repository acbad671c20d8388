"""Baselines: the published rule, and policies that cut the pool into parts, equal ones, ones as large as a gang, or the
whole for one job at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from rlix.protocol.messages import Cluster, Registration
from rlix.scheduler.plan import Expand
from rlix.scheduler.policies import Proportional
from rlix.scheduler.policies.base import Pool


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The pool as a partitioning policy sees it when the next job wants a part. Devices are numbered from 0."""

    gpus: int
    free: frozenset[int]
    jobs: int  # of the whole run
    least_to_come: int  # GPUs that the least parts of the jobs after this one need


@runtime_checkable
class Partitioned(Protocol):
    """A policy that cuts the pool into parts; jobs queue for one and are confined to it."""

    def part(self, registration: Registration, pool: PoolShape) -> tuple[int, ...] | None:
        """The devices this job is to have for itself, all of them free; None while it must wait."""
        ...

    def divide(self, pool: Pool) -> Sequence[Expand]: ...


class Fill:
    """Every rollout takes every bundle of its own that is free. Right where no two rollouts share a device."""

    def divide(self, pool: Pool) -> Sequence[Expand]:
        free = set(pool.free)
        expands = []
        for rollout in pool.rollouts:
            if not rollout.demand.trajectories:
                continue
            for number, devices in enumerate(rollout.bundles):
                if free.issuperset(devices):
                    free.difference_update(devices)
                    expands.append(Expand(rollout.pipeline_id, rollout.cluster, number))
        return expands


class Static(Fill):
    """Each job keeps an equal share of the pool for itself and trains within it.

    As many equal parts as there are jobs, each of at least one bundle of its job.

    What the division leaves over goes to the first who come, a bundle each, if it leaves everybody after them a part.
    """

    def part(self, registration: Registration, pool: PoolShape) -> tuple[int, ...] | None:
        bundle = bundle_size(registration)
        least = least_part(bundle, pool.gpus, pool.jobs)
        more = -(-pool.gpus // pool.jobs) // bundle * bundle
        fits = len(pool.free) - more >= pool.least_to_come
        return first_free(max(least, more) if fits else least, bundle, pool)


class Slots(Fill):
    """Fixed parts as large as the job's largest gang; jobs queue for a part, first come, first served."""

    def part(self, registration: Registration, pool: PoolShape) -> tuple[int, ...] | None:
        bundle = bundle_size(registration)
        gang = max(len(c.devices) for c in registration.clusters if not c.elastic)
        size = min(pool.gpus, -(-gang // bundle) * bundle)
        return first_free(size, size, pool)


class Exclusive(Fill):
    """Jobs one after another, each on the whole pool."""

    def part(self, registration: Registration, pool: PoolShape) -> tuple[int, ...] | None:
        return first_free(pool.gpus, pool.gpus, pool)


def least_part(bundle: int, gpus: int, jobs: int) -> int:
    """An equal share in whole bundles, rounded down, but at least one."""
    return max(gpus // jobs // bundle, 1) * bundle


def bundle_size(registration: Registration) -> int:
    """Devices of one bundle: of the widest where several clusters are elastic."""
    return max(cluster.tensor_parallel_size for cluster in registration.clusters if cluster.elastic)


def first_free(size: int, step: int, pool: PoolShape) -> tuple[int, ...] | None:
    """The first `size` consecutive free devices that start at a multiple of `step`."""
    starts = range(0, pool.gpus - size + 1, step)
    return next((tuple(range(s, s + size)) for s in starts if pool.free.issuperset(range(s, s + size))), None)


def confined(registration: Registration, part: tuple[int, ...]) -> Registration:
    """The same job declared inside `part`: a cluster larger than the part gets the whole part, no more."""
    return replace(registration, clusters=tuple(_confined(cluster, part) for cluster in registration.clusters))


def _confined(cluster: Cluster, part: tuple[int, ...]) -> Cluster:
    size = min(len(cluster.devices), len(part))
    size -= size % cluster.tensor_parallel_size
    return replace(cluster, devices=part[:size], alternatives=())


static, slots, exclusive = Static(), Slots(), Exclusive()
published = Proportional(margin=0.0)  # it has no memory of what it just did
