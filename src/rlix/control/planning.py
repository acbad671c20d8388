"""When the planner runs next, what it sees, and that what it decides is recorded."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlix.control.job import Job
from rlix.control.ports import Timer
from rlix.control.uncollected import uncollected
from rlix.protocol.errors import PlanError
from rlix.protocol.events import DrainStarted, Event
from rlix.protocol.messages import Demand
from rlix.scheduler.policies import Policy
from rlix.scheduler.snapshot import RolloutState, Snapshot
from rlix.scheduler.state import State

if TYPE_CHECKING:
    from rlix.control.core import Core

logger = logging.getLogger(__name__)

Decide = Callable[[Snapshot, State, Policy], tuple[Event, ...]]

_SHORT_TURN_S = 0.001
_PAUSE_TURNS = 4
_ANSWER_S = 0.001  # for the answer to be on its way to who was given a lease, before a turn of planning keeps it back


class Planning:
    """Turns of planning. There is none before `not_before`, seconds of the clock."""

    def __init__(self, core: "Core", policy: Policy, decide: Decide, stopwatch: Callable[[], float]) -> None:
        self._core = core
        self._policy = policy
        self._decide, self._stopwatch = decide, stopwatch
        self._took_s = 0.0  # the last turn
        self._next: Timer | None = None
        self._next_at = 0.0
        self.not_before = 0.0

    def soon(self, *, answered: bool = False) -> None:
        """`answered`: somebody has just been given a lease."""
        self._after(min(self._took_s, _ANSWER_S) if answered else 0.0)

    def after_a_pause(self) -> None:
        """In proportion to what a turn takes: heartbeats must not keep a large pool's loop busy."""
        self._after(0.0 if self._took_s < _SHORT_TURN_S else _PAUSE_TURNS * self._took_s)

    def _after(self, pause_s: float) -> None:
        clock = self._core.clock
        when = max(clock.time() + pause_s, self.not_before)
        if self._next is not None:
            if self._next_at <= when:
                return
            self._next.cancel()
        self._next_at = when
        self._next = clock.call_later(max(0.0, when - clock.time()), self._plan)

    def _plan(self) -> None:
        self._next = None
        core = self._core
        if core.closed or core.writer.trouble:
            return  # what is not in the journal must not be promised to anybody
        start = self._stopwatch()
        snapshot = self.snapshot()
        try:
            with uncollected():
                events = self._decide(snapshot, core.state, self._policy)
        except PlanError:
            logger.exception("the planner broke a rule; nothing is done until the next change: %r", snapshot)
            return
        core.apply(events)  # a plan is complete: what it changes itself is nothing to plan anew for
        for event in events:
            if isinstance(event, DrainStarted):
                core.rollouts.draining(core.state.leases[event.epoch].lease)
        self._took_s = self._stopwatch() - start

    def snapshot(self) -> Snapshot:
        """The state as the planner should see it: rollouts with what each job has used so far; a job that is ending or
        failed a moment ago wants nothing; one that has just ended a phase may ask for a gang any moment."""
        now = self._core.clock.time()
        snapshot, jobs = self._core.state.snapshot(now), self._core.jobs
        rollouts = (_as_seen(rollout, jobs[rollout.pipeline_id], now) for rollout in snapshot.rollouts)
        return replace(snapshot, rollouts=tuple(rollouts))


def _as_seen(rollout: RolloutState, job: Job, now: float) -> RolloutState:
    if job.muted(now):
        return replace(rollout, demand=Demand(0))
    expected = rollout.demand.trajectories == 0 and job.expects_gang(now)
    return RolloutState(
        rollout.pipeline_id,
        rollout.cluster,
        rollout.bundles,
        rollout.demand,
        rollout.waited_s,
        rollout.held_s,
        rollout.served_gpu_s,
        used_gpu_s=job.usage.gpu_s(now),
        age_s=job.usage.age_s(now),
        gang_devices=rollout.gang_devices,
        gang_expected=expected,
        gained_s=rollout.gained_s,
    )
