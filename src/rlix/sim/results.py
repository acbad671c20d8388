"""One run's numbers: what `rlix simulate --json` writes, one object per workload, policy and seed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np

from rlix.protocol.errors import SpecError
from rlix.scheduler.policies import POLICIES as SELECTABLE
from rlix.scheduler.policies.base import Policy
from rlix.sim.baselines import Partitioned, exclusive, published, slots, static
from rlix.sim.bounds import Bounds, bounds
from rlix.sim.engine import Simulation
from rlix.sim.jobs import Job, draw_jobs
from rlix.sim.ledger import Use
from rlix.sim.timeslice import timeslice
from rlix.sim.trace import Trace
from rlix.sim.workload import Workload

POLICIES: dict[str, Policy] = {
    **SELECTABLE,
    "published": published,
    "timeslice": timeslice,
    "static": static,
    "slots": slots,
    "exclusive": exclusive,
}
"""Those that a user may select, by the same names, and baselines; the last three cut the pool into parts."""


@dataclass(frozen=True, slots=True)
class Row:
    """Shares are of the pool's GPU-seconds, 0 to 1; `useful` and `tight` until the first job ends, `idle` while some
    job has rollout work. Slowdowns are against the job's critical path, alone on the pool."""

    workload: str
    policy: str
    seed: int
    gpus: int
    jobs: int
    makespan_s: float
    bound_s: float  # the largest of the lower bounds below
    makespan_over_bound: float
    useful_share: float  # kept tokens at the best batch, plus gangs
    tight_share: float  # the work of the tight bound
    idle_share: float  # free, parked or without a trajectory
    surplus_share: float  # the part of it that no allocation could have used: more GPUs than trajectories
    steps_per_hour_per_gpu: float  # over the makespan
    steps_per_hour_of_all: float  # of the whole pool, until the first job ends
    mean_job_s: float  # from arrival to end
    slowdown_mean: float
    slowdown_p95: float
    slowdown_max: float
    switches: int  # bundles loaded
    plan_ms_p50: float  # wall-clock time of a planning cycle
    plan_ms_p99: float
    steps: int
    gang_wait_s: float  # mean, from request to running
    fluid_bound_s: float  # all work at the best batch
    tight_bound_s: float  # each rollout where it spends the fewest GPU-seconds
    critical_bound_s: float  # the longest chain of one job's steps
    pinned_bound_s: float  # gangs that share a device exclude each other
    use: dict[str, float] = field(default_factory=dict)  # share of all GPU-seconds by use
    job_s: dict[str, float] = field(default_factory=dict)  # per job, from arrival to its end
    series: list[tuple[float, tuple[int, ...]]] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, object]:
        values = asdict(self)
        del values["series"]
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}


def policy_named(name: str) -> Policy:
    """Raises SpecError for a name that is no policy."""
    try:
        return POLICIES[name]
    except KeyError:
        raise SpecError(f"--policy {name}: unknown; choose from {', '.join(POLICIES)}") from None


def simulate_one(
    workload: Workload,
    policy_name: str,
    seed: int,
    *,
    check_every: int = 1,
    keep_series: bool = False,
    on_progress: Callable[[float], None] | None = None,
) -> Row:
    """Run one workload under one policy; deterministic but for the planning times."""
    policy = policy_named(policy_name)
    jobs = draw_jobs(workload, seed)
    limits = bounds(jobs, workload.pool.gpus)
    # One after another on one bundle each is the slowest anything sensible gets; beyond ten times that, nothing moves.
    horizon_s = 10 * (sum(job.tight_gpu_s for job in limits.work.values()) + jobs[-1].arrives_s + 3600.0)
    simulation = Simulation(
        workload,
        jobs,
        policy,
        seed=seed,
        check_every=check_every,
        horizon_s=horizon_s,
        keep_series=keep_series,
        on_progress=on_progress,
    )
    return row(workload, policy_name, seed, jobs, limits, simulation.run())


def row(workload: Workload, policy_name: str, seed: int, jobs: tuple[Job, ...], limits: Bounds, trace: Trace) -> Row:
    gpus, ledger = workload.pool.gpus, trace.ledger
    pool_gpu_s = max(gpus * trace.ended_s, 1e-9)
    bound_s = limits.makespan_s(pinned=not isinstance(POLICIES[policy_name], Partitioned))
    slowdowns = [seconds / limits.work[job].critical_s for job, seconds in trace.finished.items() if job in limits.work]
    first_s, tight, useful = trace.first or (trace.ended_s, 0.0, 0.0)
    first_gpu_s = max(gpus * first_s, 1e-9)
    return Row(
        workload=workload.name,
        policy=policy_name,
        seed=seed,
        gpus=gpus,
        jobs=len(jobs),
        makespan_s=trace.ended_s,
        bound_s=bound_s,
        makespan_over_bound=trace.ended_s / max(bound_s, 1e-9),
        useful_share=useful / first_gpu_s,
        tight_share=tight / first_gpu_s,
        idle_share=(ledger.idle_gpu_s + trace.unused_gpu_s) / max(ledger.demand_s * gpus, 1e-9),
        surplus_share=(ledger.surplus_gpu_s + trace.unused_gpu_s) / max(ledger.demand_s * gpus, 1e-9),
        steps_per_hour_per_gpu=trace.steps * 3600.0 / pool_gpu_s,
        steps_per_hour_of_all=trace.first_steps * 3600.0 / max(first_s, 1e-9),
        mean_job_s=_mean(list(trace.finished.values())),
        slowdown_mean=_mean(slowdowns),
        slowdown_p95=float(np.percentile(slowdowns, 95)) if slowdowns else 0.0,
        slowdown_max=max(slowdowns, default=0.0),
        switches=trace.switches,
        plan_ms_p50=float(np.percentile(trace.plan_ms, 50)),
        plan_ms_p99=float(np.percentile(trace.plan_ms, 99)),
        steps=trace.steps,
        gang_wait_s=_mean(trace.waited_s),
        fluid_bound_s=limits.fluid_s,
        tight_bound_s=limits.tight_s,
        critical_bound_s=limits.critical_s,
        pinned_bound_s=limits.pinned_s,
        use={use.name.lower(): round(ledger.gpu_s[use] / max(gpus * ledger.now, 1e-9), 6) for use in Use},
        job_s={job: round(seconds, 3) for job, seconds in trace.finished.items()},
        series=ledger.series,
    )


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
