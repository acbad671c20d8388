"""The simulation: the core of the control plane on a virtual clock, with simulated jobs.

Whatever decides, records and remembers is what runs the live pool; only the jobs, the devices and the time are made up.
"""

import math
import time
from collections.abc import Callable

import numpy as np

from rlix.protocol.errors import PlanError
from rlix.protocol.events import Event
from rlix.protocol.messages import LeaseState
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.policies.base import Policy
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State
from rlix.sim.admission import Admission
from rlix.sim.books import Books
from rlix.sim.clock import VirtualClock
from rlix.sim.jobs import Job
from rlix.sim.ledger import Ledger, Use
from rlix.sim.pool import admit, new_core
from rlix.sim.program import Program, World
from rlix.sim.trace import SimulationError, Trace
from rlix.sim.workload import Workload


class Simulation:
    """One workload under one policy. Deterministic: the same jobs and policy give the same trace."""

    def __init__(
        self,
        workload: Workload,
        jobs: tuple[Job, ...],
        policy: Policy,
        *,
        seed: int = 0,
        check_every: int = 1,
        horizon_s: float = 1e8,
        keep_series: bool = False,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """`check_every`: validate every n-th plan. `on_progress` gets the share of all steps that are done."""
        self.workload, self.policy = workload, policy
        self.clock = VirtualClock()
        self.trace = Trace(Ledger(workload.pool.gpus, keep_series=keep_series))
        books = Books(self.trace)
        self.core = new_core(workload, policy, self.clock, journal=books, decide=self._decide)
        books.state = self.core.state
        self._world = World(self.clock, self.core, self.trace, workload.switching, self._step_done, self._finish)
        self._jobs = jobs
        self._admission = Admission(workload, policy)
        self._programs: dict[str, Program] = {}
        self._left = len(jobs)
        self._check_every, self._horizon_s, self._plans = check_every, horizon_s, 0
        self._rng = np.random.default_rng([seed, 2])
        self._on_progress = on_progress
        self._all_steps = sum(job.steps for job in jobs)

    def run(self) -> Trace:
        """Raises SimulationError when nothing moves any more, or when a plan breaks a rule."""
        for job in self._jobs:
            self.clock.call_later(job.arrives_s, self._arrive, job)
            if job.departs_s < math.inf:
                self.clock.call_later(job.departs_s, self._depart, job)
        if self.workload.failures.mtbf_hours:
            self._schedule_failure()
        ledger = self.trace.ledger
        while self._left:
            when = self.clock.next_at
            if when is None or when > self._horizon_s:
                raise SimulationError(self._stuck())
            if when > ledger.now:
                wanted = sum(program.wanted_gpus() for program in self._programs.values()) if ledger.idle else 0
                ledger.advance(when, wanted)
            self.clock.step()
        return self.trace

    def _decide(self, snapshot: Snapshot, state: State, policy: Policy) -> tuple[Event, ...]:
        self._plans += 1
        start = time.perf_counter()
        try:
            events = decide(snapshot, state, policy, check_plan=self._plans % self._check_every == 0)
        except PlanError as error:  # the live pool goes on without the plan; here it is a finding
            raise SimulationError(f"{type(policy).__name__} at {self.clock.time():.0f} s: {error}") from error
        self.trace.plan_ms.append((time.perf_counter() - start) * 1e3)
        return events

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _arrive(self, job: Job) -> None:
        self._admission.arrive(job)
        self._admit()

    def _admit(self) -> None:
        for job, registration in self._admission.admit():
            admit(self.core, registration)
            self._programs[job.id] = Program(job, registration, self._world)
            self._programs[job.id].start()

    def _step_done(self) -> None:
        self.trace.steps += 1
        if self._on_progress is not None:
            self._on_progress(self.trace.steps / self._all_steps)

    def _finish(self, program: Program) -> None:
        now = self.clock.time()
        if self.trace.first is None:
            self.trace.first, self.trace.first_steps = self._work_so_far(), self.trace.steps
        self.trace.finished[program.id] = now - program.job.arrives_s
        self.trace.ended_s = now
        self._end(program, "finished")

    def _depart(self, job: Job) -> None:
        program = self._programs.get(job.id)
        if program is not None:
            self._end(program, "departed")
        elif self._admission.withdraw(job):
            self._left -= 1

    def _end(self, program: Program, why: str) -> None:
        program.leave()
        self.core.end(program.id, why)
        self._ended(program)

    def _ended(self, program: Program) -> None:
        del self._programs[program.id]
        self._left -= 1
        self._admission.leave(program.job)
        self._admit()

    def _work_so_far(self) -> tuple[float, float, float]:
        """Seconds, and tight and useful GPU-seconds of everything done until now."""
        now = self.clock.time()
        tight = useful = self.trace.ledger.gpu_s[Use.GANG] - self.trace.lost_gpu_s
        for program in self._programs.values():
            program.progress.touch(now)
            now_tight, now_useful, _ = program.progress.rollout_work()
            tight += program.progress.rollout_tight_gpu_s + now_tight
            useful += program.progress.rollout_fluid_gpu_s + now_useful
        return now, tight, useful

    # -- failures ----------------------------------------------------------------------------------------------------

    def _schedule_failure(self) -> None:
        hours = self.workload.failures.mtbf_hours
        assert hours is not None
        gap_s = float(self._rng.exponential(hours * 3600 / self.workload.pool.gpus))
        self.clock.call_later(gap_s, self._fail)

    def _fail(self) -> None:
        """A GPU fails: the lease on it is lost; the gang starts again, or the rollout goes on elsewhere."""
        device = int(self._rng.integers(self.workload.pool.gpus))
        self._schedule_failure()
        epoch = self.core.state.holder(device)
        status = None if epoch is None else self.core.state.leases[epoch]
        if status is None or status.state is not LeaseState.ACTIVE:
            return
        self.core.take(status.lease, f"device {device} failed")
        if status.lease.phase is not Phase.ROLLOUT:
            self._programs[status.lease.pipeline_id].gang_failed()

    def _stuck(self) -> str:
        waiting = [f"{r.pipeline_id} for {r.phase.name} on {r.devices}" for r in self.core.state.requests.values()]
        rolling = [
            f"{program.id} rolls out on {program.decoding_bundles} bundles"
            for program in self._programs.values()
            if program.progress.rollout is not None
        ]
        what = "; ".join((waiting + rolling)[:8]) or f"{self._left} jobs wait to be admitted"
        return f"no progress at {self.clock.time():.0f} s of simulated time under {type(self.policy).__name__}: {what}"
