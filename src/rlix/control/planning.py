"""When the planner runs next, what it sees, and that what it decides is recorded."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from rlix.control.garbage import uncollected
from rlix.control.job import Job
from rlix.control.knowledge import Knowledge
from rlix.control.ports import Timer
from rlix.protocol.events import DrainStarted, Event
from rlix.protocol.messages import Demand
from rlix.scheduler.policies import Policy
from rlix.scheduler.snapshot import RolloutState, Snapshot
from rlix.scheduler.state import State

logger = logging.getLogger(__name__)

Decide = Callable[[Snapshot, State, Policy], tuple[Event, ...]]

_SHORT_TURN_S = 0.001
_PAUSE_TURNS = 4
_ANSWER_S = 0.001  # for the answer to be on its way to who was given a lease, before a turn of planning keeps it back


class Planning:
    """Turns of planning. There is none before `not_before`, seconds of the clock. There were `turns`, in `turns_s`.

    `refused` are pipelines for which no plan can be made, and why: they are planned for no more.
    """

    def __init__(
        self, known: Knowledge, policy: Policy, decide: Decide, stopwatch: Callable[[], float], *, strict: bool
    ) -> None:
        self._known = known
        self._policy = policy
        self._decide, self._stopwatch = decide, stopwatch
        self._strict = strict
        self._took_s = 0.0  # the last turn
        self.turns, self.turns_s = 0, 0.0
        self._next: Timer | None = None
        self._next_at = 0.0
        self.not_before = 0.0
        self.refused: dict[str, str] = {}
        known.changed = self.changed

    def changed(self, answered: bool, demand_only: bool) -> None:
        """`answered`: somebody has just been given a lease."""
        if demand_only:  # in proportion to what a turn takes: heartbeats must not keep a large pool's loop busy
            self._after(0.0 if self._took_s < _SHORT_TURN_S else _PAUSE_TURNS * self._took_s)
        else:
            self._after(min(self._took_s, _ANSWER_S) if answered else 0.0)

    def soon(self) -> None:
        self._after(0.0)

    def _after(self, pause_s: float) -> None:
        clock = self._known.clock
        when = max(clock.time() + pause_s, self.not_before)
        if self._next is not None:
            if self._next_at <= when:
                return
            self._next.cancel()
        self._next_at = when
        self._next = clock.call_later(max(0.0, when - clock.time()), self._plan)

    def _plan(self) -> None:
        self._next = None
        known = self._known
        if known.closed or known.writer.trouble:
            return  # what is not in the journal must not be promised to anybody
        start = self._stopwatch()
        with uncollected():
            events = self._decided(self.snapshot())
            known.apply(events)  # a plan is complete: what it changes itself is nothing to plan anew for
            for event in events:
                if isinstance(event, DrainStarted):
                    known.ask_back(known.state.leases[event.epoch].lease)
        self._took_s = self._stopwatch() - start
        self.turns, self.turns_s = self.turns + 1, self.turns_s + self._took_s

    def _decided(self, snapshot: Snapshot) -> tuple[Event, ...]:
        state = self._known.state
        try:
            return self._decide(snapshot, state, self._policy)
        except Exception as error:  # whatever one pipeline makes it raise must not stop the others
            if self._strict:
                raise
            self._refuse(snapshot, error)
        return ()

    def _refuse(self, snapshot: Snapshot, error: Exception) -> None:
        """Plans no more for the pipeline without which a plan can be made: the last of the fewest that cannot."""
        rolling = {r.pipeline_id: None for r in snapshot.rollouts if r.demand.trajectories}
        names = list({r.pipeline_id: None for r in snapshot.requests} | rolling)
        low, high = 0, len(names)
        while low + 1 < high:
            middle = (low + high) // 2
            if self._fails(_only(snapshot, set(names[:middle]))):
                high = middle
            else:
                low = middle
        if not names:
            logger.critical("no plan can be made, although nobody wants anything", exc_info=error)
            return
        culprit = names[high - 1]
        why = f"{type(error).__name__}: {error}"[:_LONGEST_WHY]
        logger.critical("no plan can be made with pipeline %s, which gets nothing more", culprit, exc_info=error)
        self.refused[culprit] = why
        self.soon()

    def _fails(self, snapshot: Snapshot) -> bool:
        try:
            self._decide(snapshot, self._known.state, self._policy)
        except Exception:  # noqa: BLE001 - the question is whether any is raised
            return True
        return False

    def snapshot(self) -> Snapshot:
        """The state as the planner should see it: a job that is ending or failed a moment ago wants nothing; one that
        has just ended a phase may ask for a gang any moment."""
        now = self._known.clock.time()
        snapshot, jobs = self._known.state.snapshot(now), self._known.jobs
        rollouts = (_as_seen(rollout, jobs[rollout.pipeline_id], now) for rollout in snapshot.rollouts)
        snapshot = replace(snapshot, rollouts=tuple(rollouts))
        if not self.refused:
            return snapshot
        self.refused = {name: why for name, why in self.refused.items() if name in jobs}
        return _only(snapshot, jobs.keys() - self.refused.keys())

    def trouble(self) -> str:
        """Which pipelines get nothing because no plan can be made with them; "" where there are none."""
        names = self._names()
        return "; ".join(
            f"job {names.get(each, each)!r} gets nothing more, because no plan can be made with what it asks for "
            f"({why}): end it with `rlix stop`"
            for each, why in self.refused.items()
        )

    def _names(self) -> Mapping[str, str]:
        registrations = self._known.state.registrations
        return {each: registrations[each].name or each for each in self.refused if each in registrations}


_LONGEST_WHY = 300


def _only(snapshot: Snapshot, wanting: Collection[str]) -> Snapshot:
    """The others hold what they hold and want nothing."""
    return replace(
        snapshot,
        requests=tuple(r for r in snapshot.requests if r.pipeline_id in wanting),
        rollouts=tuple(r if r.pipeline_id in wanting else replace(r, demand=Demand(0)) for r in snapshot.rollouts),
    )


def _as_seen(rollout: RolloutState, job: Job, now: float) -> RolloutState:
    if job.muted(rollout.cluster, now):
        return replace(rollout, demand=Demand(0))
    expected = rollout.demand.trajectories == 0 and job.expects_gang(now)
    return replace(rollout, gang_expected=True) if expected else rollout
