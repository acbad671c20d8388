"""A flow that runs as a plan says: on which devices, in turn or beside each other, in chunks of which size."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from rlix.control.program import Program
from rlix.control.run_record import OWN, RunRecord
from rlix.flow.parts.flow_worker import FlowWorker, fetch
from rlix.flow.parts.items import Items
from rlix.flow.parts.local import LocalGroup, Shared
from rlix.flow.parts.logged import named_apart
from rlix.flow.parts.ranks import Ranks
from rlix.flow.planner import Mode, PartPlan, Plan, SegmentPlan, StagePlan
from rlix.flow.profiler.measure import start
from rlix.flow.profiler.profile import Profile
from rlix.flow.programs.checks import check_gang, check_items, wanted_plan
from rlix.flow.programs.drift import Drift, rescaled
from rlix.flow.programs.interrupts import until_ended
from rlix.flow.programs.patience import patient
from rlix.flow.programs.pieces import Pieces
from rlix.flow.programs.rollouts import Rollouts, alone
from rlix.flow.programs.segment import SegmentRun
from rlix.flow.programs.step_lease import StepLease
from rlix.flow.programs.watched import Busy
from rlix.flow.programs.wiring import Wiring
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device
from rlix.protocol.types import Phase
from rlix.workers.group import listed
from rlix.workers.locks.lock import DeviceLock
from rlix.workers.user_errors import sent

logger = logging.getLogger(__name__)

WORTH = 0.05  # a new plan must be so much faster than the present one to be worth a move
GAP_S = 2.0  # shorter ones stay with the flow: who came would be in the way of its next segment


class Running:
    """A flow with its workers. `step(items)` runs a whole step and returns what its last part made.

    Args:
        devices: those the plan counts, in its order.
        plan: "auto" (the fastest by the profile), a mode (the fastest of that mode), or a plan.
        profile: needed unless a plan is given; with it the flow is planned anew when times drift.
        job, cluster: a job of the pool and its gang, of which these are devices. A segment holds those that it uses,
            each until its stage has ended; in such gaps, between segments and between steps they are others' to use.
        leaves: the job ends at `close`.
        record: what steps and parts do is written there; it ends at `close`.
        rollouts: what the job has for parts whose devices may come and go.
        device_bytes: of each device (None: as the profile has it); what fits decides what may stay.
        timeout_s: of each wait for a part: for a call, and for its devices in its turn. A rank that has not answered by
            then is ended. To start, every part has three minutes at least.
    """

    def __init__(
        self,
        flow: Wiring,
        devices: Sequence[Device],
        *,
        plan: Plan | Mode | str = "auto",
        profile: Profile | None = None,
        job: Program | None = None,
        cluster: str | None = None,
        leaves: bool = False,
        record: RunRecord | None = None,
        rollouts: Rollouts | None = None,
        device_bytes: float | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._fixed = wanted_plan(flow.name, plan, profile)
        check_gang(flow.name, devices, job, cluster)
        self.flow, self.devices, self.profile = flow, tuple(devices), profile
        self._job, self._cluster, self._leaves, self._record = job, cluster, leaves, record
        self._rollouts, self._sharing = rollouts, dict[str, Shared]()  # parts whose devices come and go
        self._busy = Busy()
        self._device_bytes, self._timeout_s = device_bytes, timeout_s
        self.planned = None if isinstance(plan, Plan) else self._make_plan(profile)
        self.plan: Plan = plan if isinstance(plan, Plan) else self.planned.best  # type: ignore[union-attr]
        flow.check(self.plan, len(self.devices))
        self.groups: dict[str, Ranks] = {}
        self.step_s: list[float] = []
        self.metrics: dict[str, float] = {}  # of the last step: what parts logged
        self.replanned = 0
        self._states: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._lock = DeviceLock()
        self._drift = Drift.of(self.plan)
        self._started = self._closed = False
        self._stepping = threading.Lock()
        try:
            self._start()
        except BaseException:  # raised again; nobody has anything to close then
            self.close()
            raise

    def step(self, items: Sequence[Any]) -> list[Any]:
        """One step of the flow, by another plan if times have drifted.

        Raises:
            SpecError: a part does not take so many items, or the devices are not of the job's gang.
            WorkerError: a part raised or died, or has not been started again since a rank of it died.
            WaitTimeoutError: a part, which is named with its ranks, did not answer.
            RlixError: it is closed, or a step is running in another thread.
        """
        self._check_open()
        if not self._stepping.acquire(blocking=False):
            raise RlixError(f"flow {self.flow.name}: a step is running in another thread; one runs at a time")
        try:
            with self._remedy():
                self._check_lost()
                return self._step(items)
        except BaseException as error:  # raised again: whatever ended the step, its record says so
            if self._record is not None:
                self._record.broken(error)
            raise
        finally:
            self._stepping.release()

    def _step(self, items: Sequence[Any]) -> list[Any]:
        check_items(self.flow.name, items)
        for part in self.flow.parts:
            if len(items) % (chunk := part.chunk or self.flow.items):
                raise SpecError(f"{self.flow.name}: {part.name} takes multiples of {chunk} items, not {len(items)}")
        self._look_for_drift()  # here, where there is no result to lose yet
        if not self._started:
            self._start()  # an earlier move to another plan failed on the way
        for group in self.groups.values():
            group.logged.clear()  # of a step that failed
            if isinstance(group, LocalGroup):
                group.worker.step_begins(len(self.step_s))
        began = time.monotonic()
        made = self._segments(items)
        result = self._fetch(made[self.flow.parts[-1].name])
        self.step_s.append(time.monotonic() - began)
        own = {**self._busy.taken(), "planned_s": self.plan.seconds}
        logged = {name: group.logged for name, group in self.groups.items()}
        self.metrics = named_apart(logged, {*own, *OWN})
        if self._record is not None:
            self._record.step(len(self.step_s) - 1, {**self.metrics, **own})
        return result

    @property
    def ratios(self) -> dict[str, float]:
        """Measured over planned seconds of each part's calls, over the last steps."""
        return self._drift.ratios

    def explain(self) -> str:
        if self.planned is not None and self.planned.best is self.plan:
            return self.planned.explain()
        return self.plan.explain()  # as after a `switch`

    def close(self) -> None:
        self._closed = True
        for group in self.groups.values():
            group.close()
        self.groups.clear()
        if self._record is not None:
            self._record.close()
        if self._job is not None and self._leaves:
            self._job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep(self) -> None:
        """Between steps: ask every part for what it saves, for `restart` to go on from."""
        self._check_open()
        with self._remedy():
            self._check_lost()
            self._lock.clear()
            self._kept = {name: group.ask("_rlix_save", ranks=[0])[0] for name, group in self.groups.items()}

    def restart(self, *names: str) -> None:
        """After a rank has died: start these parts anew (none named: all), from what they had when `keep` was called.

        Parts that are not named go on as they are, so name those whose states must agree together. If a rank of them
        has died, too, the log says so, and the next step.
        """
        self._check_open()
        if unknown := set(names) - {part.name for part in self.flow.parts}:
            raise SpecError(f"flow {self.flow.name} has no part {', '.join(sorted(unknown))}")
        if not self._kept:
            logger.warning("%s: parts begin anew, for nothing was kept", self.flow.name)
        again = names or tuple(self.groups)
        for name, group in self.groups.items():
            if name not in again:
                self._bring_off(group)  # who is on its devices is counted anew
        self._started = False
        for name in again:
            if name in self.groups:  # or it did not start the last time
                self.groups.pop(name).close()
            if name in self._kept:
                self._states[name] = self._kept[name]
        self._start()

    def switch(self, plan: Plan) -> None:
        """Go on by another plan: parts that move are started anew from what they `save`."""
        self._check_open()
        self.flow.check(plan, len(self.devices))
        before, after = self._places(self.plan), self._places(plan)
        moving = {name for name in after if after[name] != before[name]}
        self._lock.clear()
        self._started = False
        for name in moving:
            if self.flow.part(name).worker.save is FlowWorker.save:
                logger.warning("%s: %s moves and begins anew, for its class has no `save`", self.flow.name, name)
            (self._states[name],) = self.groups[name].ask("_rlix_save", ranks=[0])
            self.groups.pop(name).close()
        self.plan = plan
        self._drift = Drift.of(plan)
        self._start()

    def _bring_off(self, group: Ranks) -> None:
        with contextlib.suppress(WaitTimeoutError):  # it is ended, and so lost
            group.offload()
        if group.lost:
            logger.warning("%s: rank(s) %s have died, too", group.name, listed(sorted(group.lost)))

    @contextlib.contextmanager
    def _remedy(self) -> Iterator[None]:
        """Add to an error what to do about the ranks that have died."""
        try:
            yield
        except (WorkerError, WaitTimeoutError) as error:
            names = [name for name, group in self.groups.items() if group.lost]
            if not names:
                raise
            state = "from what running.keep() kept" if set(names) <= set(self._kept) else "anew (nothing was kept)"
            error.args = (f"{error}; running.restart({', '.join(map(repr, names))}) starts them again, {state}",)
            if isinstance(error.__cause__, ActorDiedError):
                raise error from None  # Ray's page about a dead actor says less
            raise

    def _check_lost(self) -> None:
        lost = [
            f"{group.name}: rank(s) {listed(sorted(group.lost))} died" for group in self.groups.values() if group.lost
        ]
        if lost:
            raise WorkerError("; ".join(lost))

    def _check_open(self) -> None:
        if self._closed:
            raise RlixError(f"flow {self.flow.name} is closed: make another `Running`")

    def _start(self) -> None:
        names = {part.name: f"{self.flow.name}/{part.name}" for part in self.plan.parts}
        stages = [stage for segment in self.plan.segments for stage in segment.stages]
        stay = [stage for stage in stages if stage.stays]
        together = [frozenset(names[part.name] for part in stage.parts) for stage in stay]
        if self.plan.resident and len(stay) == len(stages):
            together.append(frozenset(names.values()))
        self._lock = DeviceLock(together)
        for placed in self.plan.parts:
            if placed.name in self.groups:
                continue
            group = self._group(placed, names[placed.name])
            try:
                if placed.name in self._states:
                    group.ask("_rlix_restore", self._states[placed.name])
            except BaseException:  # raised again; without its state it is not the part
                group.close()
                raise
            self.groups[placed.name] = group
            self._states.pop(placed.name, None)
            if isinstance(group, LocalGroup):
                group.worker.named = self._name_holders
        self._name_holders()
        self._started = True

    def _group(self, placed: PartPlan, name: str) -> Ranks:
        part, limit = self.flow.part(placed.name), self._timeout_s
        self._sharing.pop(placed.name, None)
        if self._rollouts is not None and placed.name in (shared := self._rollouts.of(self.flow, self.plan)):
            group, self._sharing[placed.name] = self._rollouts.start(part, shared[placed.name], name, limit)
            return group
        return start(part, placed.ranks, self.devices, placed.first, name, timeout_s=limit)

    def _places(self, plan: Plan) -> dict[str, object]:
        """What a part cannot change without being started anew; without devices it is nowhere."""
        own = {part.name: (part.first if part.devices else 0, part.ranks) for part in plan.parts}
        return {**own, **({} if self._rollouts is None else self._rollouts.of(self.flow, plan))}

    def _name_holders(self) -> None:
        if self._job is not None and self._cluster is not None:
            processes = [p for group in list(self.groups.values()) for p in group.processes.values()]
            self._job.name_holders(self._cluster, dict(enumerate(processes)))

    def _note(self, part: str, kind: str, start: float, end: float) -> None:
        self._busy.note(part, kind, start, end)
        placed = next(one for one in self.plan.parts if one.name == part)
        if self._record is not None and placed.devices and part not in self._sharing:  # whose replicas write it
            mine = [device.id for device in self.devices[placed.first : placed.first + placed.devices]]
            phase = self.flow.part(part).worker.phase.name.lower()
            self._record.did(phase, mine, kind, start, end, part)

    def _segments(self, items: Sequence[Any]) -> Mapping[str, Pieces]:
        with sent(f"flow {self.flow.name}", ((f"item {i} of the step", item) for i, item in enumerate(items))):
            source: Pieces = [(ray.put(Items(items)), 0, len(items))]
        made: dict[str, Pieces] = {}
        lease = None if self._job is None else StepLease(self._job.client, self._cluster or "", self._lock)
        with lease or contextlib.nullcontext():
            for segment in self.plan.segments:
                sharing = alone(segment) or ""
                shares = self._sharing.get(sharing)
                if lease is not None:
                    mine = [self.devices[i].id for i in segment.used]
                    asking = [p.name for stage in segment.stages for p in stage.parts if p.devices]
                    phase = min((self.flow.part(name).worker.phase for name in asking), default=Phase.ACTOR_TRAINING)
                    fence = lease.change(mine if shares is None else [], phase)
                    for group in self.groups.values():
                        group.lease = fence
                run = SegmentRun(self.flow, segment, self.groups, self._lock, source, made, self._timeout_s, self._note)
                waits: Any = contextlib.nullcontext()
                if shares is not None and lease is not None:
                    group, named = self.groups[sharing], self._name_holders
                    waits = patient(group, shares, lease, mine, phase, named, self._timeout_s)
                with waits:
                    self._run_stages(run, segment, lease if shares is None else None)
                made |= run.outputs()
                # How long a part takes that shares, is not its own doing.
                self._drift.saw({name: calls for name, calls in run.seconds.items() if name not in self._sharing})
        return made

    def _run_stages(self, run: SegmentRun, segment: SegmentPlan, lease: StepLease | None) -> None:
        ended = [threading.Event() for _ in segment.stages]
        try:
            for i, stage in enumerate(segment.stages):
                work = (run, stage, lease, ended[i])
                threading.Thread(target=self._stage, args=work, name=f"{self.flow.name}:{i}", daemon=True).start()
            until_ended(ended, run, [self.groups[name] for name in segment.names], held=self._job is not None)
        except BaseException as error:  # raised again; no stage goes on when the step has ended
            run.fail(error)
            raise
        run.check()

    def _stage(self, run: SegmentRun, stage: StagePlan, lease: StepLease | None, ended: threading.Event) -> None:
        try:
            run.stage(stage)
            if lease is None or not stage.used or run.failed or run.left_s < GAP_S:
                return
            names = [self.groups[part.name].name for part in stage.parts]
            lease.leave(names, [self.devices[stage.first + i].id for i in range(stage.used)])
        except BaseException as error:  # noqa: BLE001 (raised again by `check`)
            run.fail(error)
        finally:
            ended.set()

    def _fetch(self, pieces: Pieces) -> list[Any]:
        try:
            return fetch(pieces, self._timeout_s)
        except GetTimeoutError as error:
            last = self.flow.parts[-1].name
            raise WaitTimeoutError(
                f"{self.flow.name}: waited {self._timeout_s:g} s for what {last} made to come here"
            ) from error

    def _make_plan(self, profile: Profile | None) -> Any:
        assert profile is not None  # or there would be a plan already
        mode = self._fixed if isinstance(self._fixed, Mode) else None
        return self.flow.plan(profile, len(self.devices), device_bytes=self._device_bytes, mode=mode)

    def _look_for_drift(self) -> None:
        """Plan anew when parts have for a while taken another time than the plan says."""
        if self.profile is None or isinstance(self._fixed, Plan) or not (factors := self._drift.factors()):
            return
        off = ", ".join(f"{name} takes {factor:.2f} times as long" for name, factor in factors.items())
        self.profile = self.profile.scaled(factors)
        self.planned = planned = self._make_plan(self.profile)
        self.plan = rescaled(self.plan, factors, {part.name: self.flow.before(part.name) for part in self.flow.parts})
        if planned.best.shape != self.plan.shape and planned.best.seconds < self.plan.seconds * (1 - WORTH):
            logger.info("%s: %s; from now on %s", self.flow.name, off, planned.best.shape)
            self.replanned += 1
            self.switch(planned.best)
            return
        self._drift = Drift.of(self.plan, self._drift.answered)
        logger.info("%s: %s; the plan stays", self.flow.name, off)
