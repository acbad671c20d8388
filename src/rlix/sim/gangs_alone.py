"""How long jobs take when gangs are all that ever waits: every rollout has a GPU for each of its trajectories.

What remains is the queue for the devices that gangs declare, served by the planner as always. A job that is slow here
is slow because of where the gangs sit, and no division of the rest among rollouts makes up for it. (Hardly any: as in
every list schedule, a later request can let somebody else's gang in first and shorten a queue; Graham, 1969.)
"""

from collections.abc import Callable
from functools import partial

from rlix.control.gang_queue import Ticket
from rlix.protocol.messages import Lease
from rlix.protocol.types import ClusterName, Phase
from rlix.scheduler.policies.proportional import proportional
from rlix.sim.clock import VirtualClock
from rlix.sim.jobs import Job
from rlix.sim.pool import admit, new_core
from rlix.sim.workload import Workload


def gangs_alone(workload: Workload, jobs: tuple[Job, ...]) -> dict[str, float]:
    """Seconds from each job's arrival to its end, by job. Moving a gang costs nothing here; nobody departs early."""
    return _Queue(workload, jobs).run()


class _Queue:
    def __init__(self, workload: Workload, jobs: tuple[Job, ...]) -> None:
        self._clock = VirtualClock()
        self._core = new_core(workload, proportional, self._clock)
        self._seconds: dict[str, float] = {}
        for job in jobs:
            admit(self._core, job.registration)
            self._clock.call_later(job.arrives_s, self._initialize, job)

    def run(self) -> dict[str, float]:
        while self._clock.step():
            pass
        return self._seconds

    def _gang(self, job: Job, cluster: str, phase: Phase, seconds: float, then: Callable[[], None]) -> None:
        ticket = self._core.request(job.id, job.registration.cluster(cluster), phase)
        ticket.watchers.append(partial(self._granted, ticket, seconds, then))

    def _granted(self, ticket: Ticket, seconds: float, then: Callable[[], None]) -> None:
        assert isinstance(ticket.outcome, Lease), ticket.outcome
        self._clock.call_later(seconds, self._ended, ticket.outcome, then)

    def _ended(self, lease: Lease, then: Callable[[], None]) -> None:
        self._core.given_back(lease)
        then()

    def _initialize(self, job: Job) -> None:
        seconds = job.spec.initialization_s
        self._gang(job, ClusterName.ACTOR_TRAIN, Phase.INITIALIZATION, seconds, partial(self._rollout, job, 0))

    def _rollout(self, job: Job, number: int) -> None:
        width = len(job.registration.cluster(ClusterName.ACTOR_INFER).bundles)
        self._clock.call_later(job.step(number).work.shortest_s(width), self._train, job, number, 0)

    def _train(self, job: Job, number: int, gang: int) -> None:
        works = job.step(number).gangs
        if gang < len(works):
            work = works[gang]
            self._gang(job, work.cluster, work.phase, work.seconds, partial(self._train, job, number, gang + 1))
        elif number + 1 < job.steps:
            self._rollout(job, number + 1)
        else:
            self._seconds[job.id] = self._clock.time() - job.arrives_s
