"""What one job does, as one of the live pool would: ask the core for gangs, take bundles and give them back, report."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rlix.control.core import Core
from rlix.control.gang_queue import Asked, Ticket
from rlix.protocol.messages import Lease, Registration
from rlix.protocol.types import ClusterName, Phase
from rlix.sim.clock import VirtualClock, VirtualTimer
from rlix.sim.jobs import Job
from rlix.sim.ledger import Use
from rlix.sim.progress import Progress
from rlix.sim.trace import Trace
from rlix.sim.work import MOMENT_S, Rollout
from rlix.sim.workload import Switching

_INFER = ClusterName.ACTOR_INFER


@dataclass(frozen=True, slots=True)
class World:
    """What the programs of one pool have in common. `step_done` and `finished` tell whoever runs them."""

    clock: VirtualClock
    core: Core
    trace: Trace
    switching: Switching
    step_done: Callable[[], None]
    finished: Callable[["Program"], None]


@dataclass(slots=True)
class _Gang:
    lease: Lease
    since: float
    ends: VirtualTimer


class Program:
    """A job from its admission on."""

    def __init__(self, job: Job, registration: Registration, world: World) -> None:
        self.job, self.progress = job, Progress(job, world.switching.expand_s)
        self._registration, self._world = registration, world
        self._clock, self._core, self._ledger = world.clock, world.core, world.trace.ledger
        self._gang: _Gang | None = None
        self._bundles: dict[int, Lease] = {}  # that it knows of, by epoch, those included that it is giving back
        self._giving_back: set[int] = set()
        self._loaded: set[int] = set()  # with current weights
        self._open = False  # the rollout has its weights: loaded bundles decode
        self._resizing = False
        self._rollout_ends: VirtualTimer | None = None
        self._beat: VirtualTimer | None = None
        self._gone = False

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def decoding_bundles(self) -> int:
        return len(self._loaded) if self._open else 0

    def wanted_gpus(self) -> int:
        """How many GPUs more its rollout could use."""
        if self.progress.rollout is None:
            return 0
        more = self.progress.wanted_bundles() - (len(self._bundles) - len(self._giving_back))
        return max(0, more * self._registration.cluster(_INFER).tensor_parallel_size)

    def start(self) -> None:
        self._core.known.watchers(self.id, _INFER).append(self._woken)
        self._request(ClusterName.ACTOR_TRAIN, Phase.INITIALIZATION)

    def leave(self) -> None:
        """It stops where it is. What it holds is the core's to take back."""
        progress, trace = self.progress, self._world.trace
        if progress.rollout is not None:
            progress.touch(self._clock.time())
            self._ledger.demanding -= 1
        progress.close(trace)
        self._gone = True
        self._bundles.clear()
        for timer in (self._rollout_ends, self._beat, None if self._gang is None else self._gang.ends):
            if timer is not None:
                timer.cancel()

    # -- gangs -------------------------------------------------------------------------------------------------------

    def _request(self, cluster: str, phase: Phase) -> None:
        asked = Asked(home=self.progress.home(cluster), move_s=self._world.switching.move_s)
        ticket = self._core.request(self.id, self._registration.cluster(cluster), phase, asked)
        ticket.watchers.append(partial(self._answered, ticket))

    def _answered(self, ticket: Ticket) -> None:
        lease, now = ticket.outcome, self._clock.time()
        if not isinstance(lease, Lease):
            return  # the job left while it waited
        self._ledger.put(lease.devices, Use.GANG)
        self._world.trace.waited_s.append(now - ticket.asked_at)
        move_s = self._world.switching.move_s if self.progress.moves(lease) else 0.0
        takes_s = move_s + self.progress.gang_gpu_s(lease) / len(lease.devices)
        ends = self._clock.call_later(takes_s, self._gang_done, lease, move_s * len(lease.devices))
        self._gang = _Gang(lease, now, ends)

    def gang_failed(self) -> None:
        """Its lease is lost; it starts again."""
        gang, self._gang = self._gang, None
        assert gang is not None
        gang.ends.cancel()
        self._world.trace.lost_gpu_s += (self._clock.time() - gang.since) * len(gang.lease.devices)
        self._request(gang.lease.cluster, gang.lease.phase)

    def _gang_done(self, lease: Lease, moved_gpu_s: float) -> None:
        self._world.trace.lost_gpu_s += moved_gpu_s
        self._gang = None
        self._core.given_back(lease)
        if lease.phase is Phase.INITIALIZATION:
            self._begin_rollout()
            return
        self.progress.gang += 1
        if self.progress.gang < len(self.progress.step.gangs):
            self._request_next()
            return
        self._world.step_done()
        if self.progress.next_step():
            self._begin_rollout()
        else:
            self._world.finished(self)

    def _request_next(self) -> None:
        work = self.progress.work()
        self._request(work.cluster, work.phase)

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def _begin_rollout(self) -> None:
        self.progress.begin_rollout(self._clock.time())
        self._ledger.demanding += 1
        for epoch, lease in self._bundles.items():
            if epoch not in self._giving_back:
                self._ledger.put(lease.devices, Use.LOAD)
        self._clock.call_later(self._world.switching.sync_s, self._begin_decoding)
        self._report()

    def _begin_decoding(self) -> None:
        if self._gone:
            return
        self._open = True
        for epoch in self._loaded:
            self._ledger.put(self._bundles[epoch].devices, Use.DECODE)
        self._resize_soon()

    def _rollout_due(self) -> None:
        self.progress.touch(self._clock.time())
        rollout = self.progress.rollout
        assert rollout is not None
        if rollout.remaining_s() > MOMENT_S:
            self._await_end(rollout)
        else:
            self._rollout_done()

    def _await_end(self, rollout: Rollout) -> None:
        if (remaining_s := rollout.remaining_s()) < math.inf:
            self._rollout_ends = self._clock.call_later(remaining_s, self._rollout_due)

    def _rollout_done(self) -> None:
        self.progress.end_rollout()
        self._open = False
        self._ledger.demanding -= 1
        for epoch in self._loaded:
            self._ledger.put(self._bundles[epoch].devices, Use.PARKED)
        self._report()
        self._request_next()

    def _report(self) -> None:
        """What is outstanding, now and at every heartbeat until that is nothing."""
        now, beat_s = self._clock.time(), self._world.switching.heartbeat_s
        self.progress.touch(now)
        self._core.report(self.id, _INFER, self.progress.demand())
        if self._beat is not None:
            self._beat.cancel()
        if self.progress.rollout is not None:
            self._beat = self._clock.call_later((math.floor(now / beat_s) + 1) * beat_s - now, self._report)

    # -- bundles -----------------------------------------------------------------------------------------------------

    def _woken(self) -> None:
        """Something is new about its bundles; it looks when all of this moment's news is there."""
        if not self._gone:
            self._clock.call_later(0.0, self._look)

    def _look(self) -> None:
        if self._gone:
            return
        news = True
        while news:
            answer = self._core.poll(self.id, _INFER, self._bundles.keys(), self._giving_back)
            for lease in answer.granted:
                self._load(lease)
            for lease in answer.taken:
                self._drain(lease)
            for epoch in answer.lost:
                self._forget(epoch)
            news = bool(answer.granted or answer.taken or answer.lost)
        self._core.known.watchers(self.id, _INFER).append(self._woken)

    def _load(self, lease: Lease) -> None:
        self._bundles[lease.epoch] = lease
        self._ledger.put(lease.devices, Use.LOAD)
        self._clock.call_later(self._world.switching.expand_s, self._has_loaded, lease)

    def _has_loaded(self, lease: Lease) -> None:
        if lease.epoch not in self._bundles or lease.epoch in self._giving_back:
            return
        self._loaded.add(lease.epoch)
        if self.progress.rollout is None:
            self._ledger.put(lease.devices, Use.PARKED)
        elif self._open:
            self._ledger.put(lease.devices, Use.DECODE)
            self._resize_soon()

    def _drain(self, lease: Lease) -> None:
        self._giving_back.add(lease.epoch)
        self._loaded.discard(lease.epoch)
        self._resize_soon()
        step_s, rollout = 0.0, self.progress.rollout
        if rollout is not None:
            self.progress.touch(self._clock.time())
            step_s = rollout.interruptible_s(self.decoding_bundles)
        self._clock.call_later(step_s + self._world.switching.shrink_s, self._give_back, lease)

    def _give_back(self, lease: Lease) -> None:
        if lease.epoch in self._bundles:
            self._forget(lease.epoch)
            self._core.given_back(lease)

    def _forget(self, epoch: int) -> None:
        del self._bundles[epoch]
        self._giving_back.discard(epoch)
        if epoch in self._loaded:
            self._loaded.discard(epoch)
            self._resize_soon()

    def _resize_soon(self) -> None:
        """Once for all changes of this moment: every change of width moves trajectories."""
        if self.progress.rollout is not None and not self._resizing:
            self._resizing = True
            self._clock.call_later(0.0, self._resize)

    def _resize(self) -> None:
        self._resizing = False
        rollout = self.progress.rollout
        if rollout is None or self._gone:
            return
        self.progress.touch(self._clock.time())
        rollout.resize(self.decoding_bundles)
        if self._rollout_ends is not None:
            self._rollout_ends.cancel()
        self._await_end(rollout)
