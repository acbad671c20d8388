"""The simulation loop: events reach `scheduler.State`, `decide` answers, and time passes.

The control plane runs the same two calls on the same event types; only the jobs and the clock are simulated here.
All events of one moment are applied before the one planning cycle that answers them.
"""

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlix.protocol.events import (
    DemandReported,
    DevicesDiscovered,
    DrainStarted,
    Event,
    GangRequested,
    LeaseGranted,
    LeaseReleased,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineRegistered,
    PipelineUnregistered,
)
from rlix.protocol.messages import Lease, LeaseState, ReleaseReason
from rlix.protocol.types import ClusterName, Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.policies.base import Policy
from rlix.scheduler.snapshot import RolloutState, Snapshot
from rlix.scheduler.state import State
from rlix.sim.admission import Admission
from rlix.sim.jobs import Job, devices_of
from rlix.sim.ledger import Ledger, Use
from rlix.sim.live import LiveJob
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
        self.workload, self.policy, self.now = workload, policy, 0.0
        self.state = State()
        self.ledger = Ledger(workload.pool.gpus, keep_series=keep_series)
        self.trace = Trace(self.ledger)
        self._jobs = jobs
        self._admission = Admission(workload, policy)
        self._live: dict[str, LiveJob] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._left = len(jobs)
        self._resized: dict[str, LiveJob] = {}
        self._changed = False
        self._beating = False
        self._promised: set[int] = set()
        self._requested_s: dict[str, float] = {}
        self._check_every, self._horizon_s, self._cycles = check_every, horizon_s, 0
        self._rng = np.random.default_rng([seed, 2])
        self._on_progress = on_progress
        self._all_steps = sum(job.steps for job in jobs)

    def run(self) -> Trace:
        self.state.apply(DevicesDiscovered(devices_of(self.workload)), self.now)
        for job in self._jobs:
            self._at(job.arrives_s, lambda job=job: self._arrive(job))  # type: ignore[misc]
            if job.departs_s < math.inf:
                self._at(job.departs_s, lambda job=job: self._depart(job))  # type: ignore[misc]
        if self.workload.failures.mtbf_hours:
            self._schedule_failure()
        while self._left:
            if not self._queue or self.now > self._horizon_s:
                raise SimulationError(self._stuck())
            self._moment()
        self.ledger.advance(self.now)
        return self.trace

    # -- time ----------------------------------------------------------------------------------------------------

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, what))

    def _moment(self) -> None:
        """Everything that happens now, then one planning cycle."""
        self.now = self._queue[0][0]
        wanted = sum(live.wanted_gpus() for live in self._live.values()) if self.ledger.idle else 0
        self.ledger.advance(self.now, wanted)
        while self._queue and self._queue[0][0] <= self.now + 1e-9:
            heapq.heappop(self._queue)[2]()
        self._settle()
        if self._changed:
            self._changed = False
            self._cycle()
            self._settle()

    def _settle(self) -> None:
        """Rollouts whose bundles changed go on at their new width."""
        for live in self._resized.values():
            if live.rollout is None:
                continue
            live.touch(self.now)
            live.rollout.resize(len(live.loaded) if live.open else 0)
            live.version += 1
            remaining = live.rollout.remaining_s()
            if remaining < math.inf:
                self._at(self.now + remaining, lambda v=live, n=live.version: self._rollout_done(v, n))  # type: ignore[misc]
        self._resized.clear()

    def _cycle(self) -> None:
        snapshot = self._snapshot()
        self._cycles += 1
        start = time.perf_counter()
        events = decide(snapshot, self.state, self.policy, check_plan=self._cycles % self._check_every == 0)
        self.trace.plan_ms.append((time.perf_counter() - start) * 1e3)
        for event in events:
            if isinstance(event, DrainStarted):
                self._shrink(event)
            elif isinstance(event, LeaseGranted):
                self._grant(event)

    def _snapshot(self) -> Snapshot:
        """The state as the control plane would see it: with what each job has used so far."""
        snapshot = self.state.snapshot(self.now)
        return replace(snapshot, rollouts=tuple(map(self._as_seen, snapshot.rollouts)))

    def _as_seen(self, rollout: RolloutState) -> RolloutState:
        live = self._live[rollout.pipeline_id]
        live.use(self.now, 0)
        return replace(rollout, used_gpu_s=live.used_gpu_s, age_s=self.now - live.admitted_s)

    def _grant(self, event: LeaseGranted) -> None:
        lease = event.lease
        if lease.phase is Phase.ROLLOUT:
            self.trace.switches += 1
        active = self.state.apply(event, self.now)
        if not active:
            self._promised.update(lease.devices)
            for device in lease.devices:  # those already free wait for the others
                self.ledger.put((device,), Use.DRAIN)
        self._activate(active)

    def _shrink(self, event: DrainStarted) -> None:
        lease = self.state.leases[event.epoch].lease
        self.state.apply(event, self.now)
        self._drop_bundle(lease)
        self.ledger.put(lease.devices, Use.DRAIN)
        self._at(self.now + self.workload.switching.shrink_s, lambda: self._release(lease.epoch, ReleaseReason.SHRUNK))

    def _drop_bundle(self, lease: Lease) -> None:
        live = self._live[lease.pipeline_id]
        live.loaded.discard(lease.epoch)
        if live.rollout is not None:
            live.use(self.now, -len(lease.devices))
            self._resized[live.id] = live

    # -- leases --------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        self._changed = True
        self._activate(self.state.apply(event, self.now))

    def _release(self, epoch: int, reason: ReleaseReason) -> None:
        status = self.state.leases.get(epoch)
        if status is None:
            return  # went with its job
        self._vacate(status.lease)
        self._apply(LeaseReleased(epoch, reason))

    def _vacate(self, lease: Lease) -> None:
        for device in lease.devices:
            self.ledger.put((device,), Use.DRAIN if device in self._promised else Use.FREE)

    def _activate(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            self._promised.difference_update(lease.devices)
            live = self._live[lease.pipeline_id]
            if lease.phase is Phase.ROLLOUT:
                self.ledger.put(lease.devices, Use.LOAD)
                if live.rollout is not None:
                    live.use(self.now, len(lease.devices))
                self._at(self.now + self.workload.switching.expand_s, lambda e=lease: self._loaded(e))  # type: ignore[misc]
            else:
                self._start_gang(live, lease)

    def _loaded(self, lease: Lease) -> None:
        status = self.state.leases.get(lease.epoch)
        if status is None or status.state is not LeaseState.ACTIVE:
            return
        live = self._live[lease.pipeline_id]
        live.loaded.add(lease.epoch)
        if live.rollout is None:
            self.ledger.put(lease.devices, Use.PARKED)
        elif live.open:
            self.ledger.put(lease.devices, Use.DECODE)
            self._resized[live.id] = live

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _arrive(self, job: Job) -> None:
        self._admission.arrive(job)
        self._admit()

    def _admit(self) -> None:
        for job, registration in self._admission.admit():
            self.state.apply(PipelineAllocated(job.id, "sim"), self.now)
            self.state.apply(PipelineRegistered(registration), self.now)
            self.state.apply(PipelineAdmitted(job.id), self.now)
            self._live[job.id] = LiveJob(job, registration, self.now, self.workload.switching.expand_s)
            self._request(self._live[job.id], ClusterName.ACTOR_TRAIN, Phase.INITIALIZATION)

    def _request(self, live: LiveJob, cluster: str, phase: Phase) -> None:
        self._requested_s[live.id] = self.now
        self._apply(GangRequested(self.state.next_request_id, live.id, cluster, phase))

    def _start_gang(self, live: LiveJob, lease: Lease) -> None:
        self.ledger.put(lease.devices, Use.GANG)
        live.use(self.now, len(lease.devices))
        live.gang_epoch, live.gang_since = lease.epoch, self.now
        self.trace.waited_s.append(self.now - self._requested_s[live.id])
        move_s = self.workload.switching.move_s if live.moves(lease) else 0.0
        ends = self.now + move_s + live.gang_gpu_s(lease) / len(lease.devices)
        self._at(ends, lambda: self._gang_done(live, lease, move_s * len(lease.devices)))

    def _gang_done(self, live: LiveJob, lease: Lease, moved_gpu_s: float) -> None:
        if live.gang_epoch != lease.epoch or live.id not in self._live:
            return
        self.trace.lost_gpu_s += moved_gpu_s
        live.gang_epoch = None
        live.use(self.now, -len(lease.devices))
        self._release(lease.epoch, ReleaseReason.RELEASED)
        if lease.phase is Phase.INITIALIZATION:
            self._begin_rollout(live)
            return
        live.gang += 1
        if live.gang < len(live.step.gangs):
            self._request(live, live.work().cluster, live.work().phase)
            return
        self.trace.steps += 1
        if self._on_progress is not None:
            self._on_progress(self.trace.steps / self._all_steps)
        if live.next_step():
            self._begin_rollout(live)
        else:
            self._finish(live)

    def _begin_rollout(self, live: LiveJob) -> None:
        live.begin_rollout(self.now)
        self.ledger.demanding += 1
        for status in self.state.leases_of(live.id):
            if status.lease.phase is Phase.ROLLOUT and status.state is LeaseState.ACTIVE:
                live.use(self.now, len(status.lease.devices))
                self.ledger.put(status.lease.devices, Use.LOAD)
        number = live.number
        wait_s = max(self.workload.switching.sync_s, live.step.reset_s)
        self._at(self.now + wait_s, lambda: self._open(live, number))
        self._report(live)
        if not self._beating:
            self._beating = True
            beat_s = self.workload.switching.heartbeat_s
            self._at((math.floor(self.now / beat_s) + 1) * beat_s, self._beat)

    def _open(self, live: LiveJob, number: int) -> None:
        if live.rollout is None or live.number != number:
            return
        live.open = True
        for epoch in live.loaded:
            self.ledger.put(self.state.leases[epoch].lease.devices, Use.DECODE)
        self._resized[live.id] = live

    def _rollout_done(self, live: LiveJob, version: int) -> None:
        if live.rollout is None or live.version != version:
            return
        live.touch(self.now)
        live.end_rollout()
        self.ledger.demanding -= 1
        for epoch in live.loaded:
            self.ledger.put(self.state.leases[epoch].lease.devices, Use.PARKED)
        for status in self.state.leases_of(live.id):
            if status.state is LeaseState.ACTIVE:
                live.use(self.now, -len(status.lease.devices))
        self._report(live)
        self._request(live, live.work().cluster, live.work().phase)

    def _beat(self) -> None:
        """Every rollout reports, when what it would say has changed."""
        rolling = [live for live in self._live.values() if live.rollout is not None]
        self._beating = bool(rolling)
        if rolling:
            self._at(self.now + self.workload.switching.heartbeat_s, self._beat)
        for live in rolling:
            self._report(live)

    def _report(self, live: LiveJob) -> None:
        live.touch(self.now)
        self._apply(DemandReported(live.id, ClusterName.ACTOR_INFER, live.demand()))

    def _finish(self, live: LiveJob) -> None:
        if self.trace.first is None:
            self.trace.first = self._work_so_far()
        self.trace.finished[live.id] = self.now - live.job.arrives_s
        self.trace.ended_s = self.now
        self._leave(live)

    def _depart(self, job: Job) -> None:
        live = self._live.get(job.id)
        if live is None:
            if self._admission.withdraw(job):
                self._left -= 1
            return
        if live.rollout is not None:
            self.ledger.demanding -= 1
        self._leave(live)

    def _leave(self, live: LiveJob) -> None:
        """The job's leases, requests and demand go with it."""
        if live.rollout is not None:
            live.touch(self.now)
        tight, _, tokens = live.rollout_work()
        rollout = live.rollout
        self.trace.tight_gpu_s += live.rollout_tight_gpu_s + tight
        self.trace.tokens += live.tokens + tokens
        self.trace.unused_gpu_s += live.unused_gpu_s + (rollout.unused_gpu_s if rollout else 0.0)
        self.trace.prefill_gpu_s += live.prefill_gpu_s + (rollout.prefill_gpu_s if rollout else 0.0)
        live.rollout = None
        for status in self.state.leases_of(live.id):
            if status.state is LeaseState.PENDING:
                self._promised.difference_update(status.lease.devices)
        for status in self.state.leases_of(live.id):
            if status.state is not LeaseState.PENDING:
                self._vacate(status.lease)
        self._apply(PipelineUnregistered(live.id, "finished"))
        del self._live[live.id]
        self._left -= 1
        self._admission.leave(live.job)
        self._admit()

    def _work_so_far(self) -> tuple[float, float, float]:
        """Seconds, and tight and useful GPU-seconds of everything done until now."""
        tight = useful = self.ledger.gpu_s[Use.GANG] - self.trace.lost_gpu_s
        for live in self._live.values():
            live.touch(self.now)
            now_tight, now_useful, _ = live.rollout_work()
            tight += live.rollout_tight_gpu_s + now_tight
            useful += live.rollout_fluid_gpu_s + now_useful
        return self.now, tight, useful

    # -- failures ------------------------------------------------------------------------------------------------

    def _schedule_failure(self) -> None:
        hours = self.workload.failures.mtbf_hours
        assert hours is not None
        gap_s = float(self._rng.exponential(hours * 3600 / self.workload.pool.gpus))
        self._at(self.now + gap_s, self._fail)

    def _fail(self) -> None:
        """A GPU fails: the lease on it is lost; the gang starts again, or the rollout goes on elsewhere."""
        device = int(self._rng.integers(self.workload.pool.gpus))
        self._schedule_failure()
        for status in self.state.leases.values():
            if device in status.lease.devices and status.state is LeaseState.ACTIVE:
                break
        else:
            return
        lease, live = status.lease, self._live[status.lease.pipeline_id]
        if lease.phase is Phase.ROLLOUT:
            self._drop_bundle(lease)
            self._release(lease.epoch, ReleaseReason.KILLED)
            return
        live.gang_epoch = None
        live.use(self.now, -len(lease.devices))
        self.trace.lost_gpu_s += (self.now - live.gang_since) * len(lease.devices)
        self._release(lease.epoch, ReleaseReason.KILLED)
        self._request(live, lease.cluster, lease.phase)

    def _stuck(self) -> str:
        waiting = [f"{r.pipeline_id} for {r.phase.name} on {r.devices}" for r in self.state.requests.values()]
        rolling = [f"{live.id} rolls out on {len(live.loaded)} bundles" for live in self._live.values() if live.rollout]
        what = "; ".join((waiting + rolling)[:8]) or f"{self._left} jobs wait to be admitted"
        return f"no progress at {self.now:.0f} s of simulated time under {type(self.policy).__name__}: {what}"
