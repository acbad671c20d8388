"""Who may start, and where: as declared, or confined to one of the parts a partitioning policy cuts the pool into."""

from collections import deque
from collections.abc import Iterator

from rlix.protocol.messages import Registration
from rlix.scheduler.policies.base import Policy
from rlix.sim.baselines import Partitioned, PoolShape, confined, least_part
from rlix.sim.jobs import Job
from rlix.sim.workload import JobSpec, Workload


class Admission:
    """First come, first served. Without parts everyone is admitted at once."""

    def __init__(self, workload: Workload, policy: Policy) -> None:
        self._waiting: deque[Job] = deque()
        self._policy = policy
        self._jobs = workload.job_count
        self._gpus = workload.pool.gpus
        self._least_to_come = sum(job.count * self._least(job) for job in workload.jobs)
        self._free = set(range(workload.pool.gpus))
        self._part_of: dict[str, tuple[int, ...]] = {}

    def _least(self, spec: JobSpec) -> int:
        return least_part(spec.rollout.tensor_parallel, self._gpus, self._jobs)

    def arrive(self, job: Job) -> None:
        self._waiting.append(job)

    def admit(self) -> Iterator[tuple[Job, Registration]]:
        """Those who may start now, with the registration they start with."""
        while self._waiting:
            job = self._waiting[0]
            registration = job.registration
            if isinstance(self._policy, Partitioned):
                least_after = self._least_to_come - self._least(job.spec)
                shape = PoolShape(self._gpus, frozenset(self._free), self._jobs, least_after)
                part = self._policy.part(registration, shape)
                if part is None:
                    return
                self._free.difference_update(part)
                self._part_of[job.id] = part
                registration = confined(registration, part)
            self._waiting.popleft()
            self._least_to_come -= self._least(job.spec)
            yield job, registration

    def leave(self, job: Job) -> None:
        self._free.update(self._part_of.pop(job.id, ()))

    def withdraw(self, job: Job) -> bool:
        """The job goes before it was admitted; False when it is not waiting."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        self._least_to_come -= self._least(job.spec)
        return True
