"""How long jobs take when gangs are all that ever waits: every rollout has a GPU for each of its trajectories.

What remains is the queue for the devices that gangs declare, served by the planner as always. A job that is slow here
is slow because of where the gangs sit, and no division of the rest among rollouts makes up for it. (Hardly any: as in
every list schedule, a later request can let somebody else's gang in first and shorten a queue; Graham, 1969.)
"""

import heapq
from collections.abc import Callable
from itertools import count

from rlix.protocol.events import (
    DevicesDiscovered,
    GangRequested,
    LeaseGranted,
    LeaseReleased,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineRegistered,
)
from rlix.protocol.messages import ReleaseReason
from rlix.protocol.types import ClusterName, Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.policies.proportional import proportional
from rlix.scheduler.state import State
from rlix.sim.jobs import Job, devices_of
from rlix.sim.workload import Workload


def gangs_alone(workload: Workload, jobs: tuple[Job, ...]) -> dict[str, float]:
    """Seconds from each job's arrival to its end, by job. Moving a gang costs nothing here; nobody departs early."""
    return _Queue(workload, jobs).run()


class _Queue:
    def __init__(self, workload: Workload, jobs: tuple[Job, ...]) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._granted: dict[int, Callable[[int], None]] = {}  # request -> what to do with its lease
        self._seconds: dict[str, float] = {}
        self._state = State()
        self._state.apply(DevicesDiscovered(devices_of(workload)), self._now)
        for job in jobs:
            self._state.apply(PipelineAllocated(job.id, "sim"), self._now)
            self._state.apply(PipelineRegistered(job.registration), self._now)
            self._state.apply(PipelineAdmitted(job.id), self._now)
            self._at(job.arrives_s, lambda job=job: self._initialize(job))  # type: ignore[misc]

    def run(self) -> dict[str, float]:
        while self._events:
            self._now = self._events[0][0]
            while self._events and self._events[0][0] <= self._now + 1e-9:
                heapq.heappop(self._events)[2]()
            self._grant()
        return self._seconds

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _grant(self) -> None:
        for event in decide(self._state.snapshot(self._now), self._state, proportional):
            if isinstance(event, LeaseGranted) and event.request_id is not None:
                self._state.apply(event, self._now)
                self._granted.pop(event.request_id)(event.lease.epoch)

    def _gang(self, job: Job, cluster: str, phase: Phase, seconds: float, then: Callable[[], None]) -> None:
        def ended(epoch: int) -> None:
            self._state.apply(LeaseReleased(epoch, ReleaseReason.RELEASED), self._now)
            then()

        request_id = self._state.next_request_id
        self._granted[request_id] = lambda epoch: self._at(self._now + seconds, lambda: ended(epoch))
        self._state.apply(GangRequested(request_id, job.id, cluster, phase), self._now)

    def _initialize(self, job: Job) -> None:
        seconds = job.spec.initialization_s
        self._gang(job, ClusterName.ACTOR_TRAIN, Phase.INITIALIZATION, seconds, lambda: self._rollout(job, 0))

    def _rollout(self, job: Job, number: int) -> None:
        width = len(job.registration.cluster(ClusterName.ACTOR_INFER).bundles)
        self._at(self._now + job.step(number).rollout_s(width), lambda: self._train(job, number, 0))

    def _train(self, job: Job, number: int, gang: int) -> None:
        works = job.step(number).gangs
        if gang < len(works):
            work = works[gang]
            self._gang(job, work.cluster, work.phase, work.seconds, lambda: self._train(job, number, gang + 1))
        elif number + 1 < job.steps:
            self._rollout(job, number + 1)
        else:
            self._seconds[job.id] = self._now - job.arrives_s
