"""A job as users see it."""

import math
from datetime import datetime

from rlix.scheduler.queue.jobs import PRIORITY_NAMES, Job, State
from rlix.scheduler.queue.reasons import Wait, sentence
from rlix.serve.api.models import JobView
from rlix.serve.queue.keeper import Keeper

_DAY_S = 86400.0


def view(keeper: Keeper, job: Job, now: float) -> JobView:
    waits = job.state in (State.SUBMITTED, State.HELD)
    return view_of(keeper, job, keeper.wait_of(job.id) if waits else None, now)


def view_of(keeper: Keeper, job: Job, wait: Wait | None, now: float) -> JobView:
    """`wait`: why it waits, if it does."""
    seen = keeper.seen(job.id)
    step, steps = (seen.step, seen.steps) if seen is not None and seen.steps else (job.step, job.steps)
    return JobView(
        id=job.id,
        name=job.name,
        owner=job.owner,
        team=job.team,
        state=job.state,
        gpus=job.gpus,
        priority=PRIORITY_NAMES.get(job.priority, str(job.priority)),
        preemptible=job.preemptible,
        limit_s=None if job.limit_s == math.inf else job.limit_s,
        submitted_at=job.submitted_at,
        since=job.since,
        started_at=job.admitted_at or None,
        reason=_reason(keeper, job, wait, now),
        ahead=wait.ahead if wait is not None else None,
        start=wait.start if wait is not None else None,
        outcome=job.outcome,
        requeues=job.requeues,
        pipeline_id=job.pipeline_id,
        phase=seen.phase if seen is not None else "",
        step=step,
        steps=steps,
        run_dir=str(keeper.work(job).run_dir),
    )


def _reason(keeper: Keeper, job: Job, wait: Wait | None, now: float) -> str:
    seen = keeper.seen(job.id)
    if job.stop is not None:
        return f"stops: {job.stop.why}"
    if job.state is State.ENDED:
        return job.why
    if job.state is State.ADMITTED:
        return "is being started" if not keeper.pool_why else f"is to be started; the pool: {keeper.pool_why}"
    if job.state is State.RUNNING:
        return seen.phase if seen is not None else "the pool has not been asked yet"
    if keeper.pool_why and job.state is not State.HELD:
        return f"the pool: {keeper.pool_why}"
    if wait is None:
        return "starts at once"
    return sentence(wait, keeper.pool.unit, lambda at: clock(at, now))


def clock(at: float, now: float) -> str:
    """A time as people say it: "14:20", or with the day when that is another one."""
    when, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now)
    if when.date() == today.date():
        return when.strftime("%H:%M")
    return when.strftime("%a %H:%M") if abs(at - now) < 6 * _DAY_S else when.strftime("%Y-%m-%d %H:%M")
