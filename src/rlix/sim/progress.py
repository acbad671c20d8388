"""How far a job has come: its steps, its rollout, and what it can report of them."""

from dataclasses import dataclass, field

from rlix.protocol.messages import Demand, Lease
from rlix.protocol.types import ClusterName, Phase
from rlix.sim.jobs import GangWork, Job, Step
from rlix.sim.trace import Trace
from rlix.sim.work import Rollout, Work

_PILOT = 1_000_000  # the number of a step nobody trains on: what the job knows of its lengths when it starts


@dataclass(slots=True)
class Progress:
    """`since` is when the rollout was last advanced."""

    job: Job
    load_s: float = 0.0  # what a bundle takes to load
    number: int = 0
    step: Step = field(init=False)
    rollout: Rollout | None = None
    gang: int = 0  # the next of the step's gangs
    gang_on: dict[str, tuple[int, ...]] = field(default_factory=dict)  # where each cluster's gang last was
    since: float = 0.0
    rollout_tight_gpu_s: float = 0.0  # of finished steps
    rollout_fluid_gpu_s: float = 0.0
    unused_gpu_s: float = 0.0
    prefill_gpu_s: float = 0.0
    tokens: float = 0.0
    _expected: Work = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.job.step(0)
        self._expected = self.job.step(_PILOT).work

    def work(self) -> GangWork:
        return self.step.gangs[self.gang]

    def home(self, cluster: str) -> tuple[int, ...]:
        """Where a gang's state lies; () before it has begun."""
        return self.gang_on.get(cluster, ())

    def moves(self, lease: Lease) -> bool:
        """Notes where a gang is; True when its state was elsewhere before."""
        before = self.gang_on.get(lease.cluster, lease.devices)
        self.gang_on[lease.cluster] = lease.devices
        return lease.devices != before

    def gang_gpu_s(self, lease: Lease) -> float:
        if lease.phase is Phase.INITIALIZATION:
            return self.job.spec.initialization_s * len(self.job.registration.cluster(lease.cluster).devices)
        return self.work().seconds * self.work().gpus

    def wanted_bundles(self) -> int:
        """How many bundles its rollout could use: one for each trajectory, as declared."""
        if self.rollout is None:
            return 0
        declared = self.job.registration.cluster(ClusterName.ACTOR_INFER)
        return min(self.rollout.alive, len(declared.devices) // declared.tensor_parallel_size)

    def begin_rollout(self, now: float) -> None:
        self.rollout = self.step.work.begin()
        self.since, self.gang = now, 0

    def touch(self, now: float) -> None:
        if self.rollout is not None:
            self.rollout.advance(now - self.since)
        self.since = now

    def end_rollout(self) -> None:
        assert self.rollout is not None
        self.rollout.finish()
        self._count(self.rollout)
        self.rollout = None
        self._expected = self.step.work

    def close(self, trace: Trace) -> None:
        """The job ends here: enters what it did, a rollout in flight as far as it came."""
        if self.rollout is not None:
            self._count(self.rollout)
            self.rollout = None
        trace.tokens += self.tokens
        trace.unused_gpu_s += self.unused_gpu_s
        trace.prefill_gpu_s += self.prefill_gpu_s

    def _count(self, rollout: Rollout) -> None:
        self.unused_gpu_s += rollout.unused_gpu_s
        self.prefill_gpu_s += rollout.prefill_gpu_s
        tight, fluid, tokens = self.rollout_work()
        self.rollout_tight_gpu_s += tight
        self.rollout_fluid_gpu_s += fluid
        self.tokens += tokens

    def rollout_work(self) -> tuple[float, float, float]:
        """GPU-seconds (tight, fluid and kept) and tokens of the rollout in flight so far."""
        if self.rollout is None:
            return 0.0, 0.0, 0.0
        done, reference_gpu_s = self.rollout.done, self.step.work.decoder.reference_gpu_s
        return done.tight_gpu_s, done.tokens * reference_gpu_s * self.step.useful, done.tokens

    def next_step(self) -> bool:
        """Moves on; False when all steps are done."""
        self.number += 1
        self.gang = 0
        if self.number == self.job.steps:
            return False
        self.step = self.job.step(self.number)
        return True

    def demand(self) -> Demand:
        """What a job can honestly report: its lengths are guessed from the step before, not known in advance."""
        step_gpu_s = self.step.gang_gpu_s + self._expected.total.tight_gpu_s
        left_gpu_s = (self.job.steps - self.number) * step_gpu_s
        if self.rollout is None:
            return Demand(0, left_gpu_s=left_gpu_s)
        alive = self.rollout.alive
        outlook = self._expected.outlook(alive, self.rollout.depth)
        return Demand(
            alive,
            int(outlook.tokens),
            knee=self._expected.decoder.knee,
            work_s=outlook.work_s,
            floor_s=outlook.floor_s,
            left_gpu_s=left_gpu_s,
            load_s=self.load_s,
        )
