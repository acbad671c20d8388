"""What pages show, looked at once for all of them: the pool every second, usage every minute, runs when asked for."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from rlix.monitor.curves import RunReader, cut
from rlix.monitor.records import SampleText
from rlix.monitor.waits import waits
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus, LeaseState
from rlix.scheduler.queue.jobs import Job, State
from rlix.serve.api import models
from rlix.serve.api.views import view
from rlix.serve.page.history import History
from rlix.serve.queue.accounts import Accounts
from rlix.serve.queue.keeper import Keeper, printable

logger = logging.getLogger(__name__)

LOOK_S = 1.0
MOST_JOBS, MOST_ENDED, MOST_PROGRAMS, MOST_WAITS = 500, 20, 100, 50
"""So many of each are told; of the rest, how many there are."""
LONGEST_S = 86400.0
"""The longest stretch of time that can be asked for."""
_FIRST_S = 3600.0  # of what was before the service is asked for at first
_USAGE_S = 86400.0
_USAGE_EVERY_S = 60.0
_READERS = 32
_NOTHING = ControlStatus((), (), ())


class Live:
    """Belongs to the keeper's loop."""

    def __init__(self, keeper: Keeper, accounts: Accounts, now: Callable[[], float]) -> None:
        self._keeper, self._accounts, self._now = keeper, accounts, now
        self._history = History()
        self._control = _NOTHING
        self._names: dict[str, str] = {}  # of pipelines, also of those that have ended
        self._told: models.Overview | None = None
        self._usage: tuple[float, list[models.TeamUsage]] = (-_USAGE_EVERY_S, [])
        self._readers: OrderedDict[Path, tuple[RunReader, asyncio.Lock]] = OrderedDict()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.look()
            except RlixError as error:  # without a pool; the queue says so
                logger.debug("the page sees no pool: %s", error)
                self._control = _NOTHING
                self._history.only((), self._now())
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Raises RlixError: there is no pool now."""
        self._control, records = await self._keeper.leases(self._history.since() or int((self._now() - _FIRST_S) * 1e6))
        self._history.take(records)
        held = {s.lease.epoch for s in self._control.leases if s.state is not LeaseState.PENDING}
        self._history.only(held, self._now())
        self._names.update({p.pipeline_id: p.name for p in self._control.pipelines})
        while len(self._names) > 4096:
            self._names.pop(next(iter(self._names)))

    # -- what is answered --------------------------------------------------------------------------------------------

    def overview(self) -> models.Overview:
        """As of this second: many pages ask."""
        if self._told is None or not 0 <= self._now() - self._told.time < LOOK_S:
            self._told = self._overview()
        return self._told

    def forget(self) -> None:
        """Something was changed by who looks again at once."""
        self._told = None

    def _overview(self) -> models.Overview:
        keeper, now = self._keeper, self._now()
        running = sorted((job for job in keeper.jobs.values() if job.active), key=lambda job: -job.admitted_at)
        waiting = [job for job in keeper.jobs.values() if not job.active]
        waiting.sort(key=lambda job: (job.state is State.HELD, self._ahead(job), job.id))
        shown = [*running, *waiting][:MOST_JOBS]
        programs = self._programs()
        called = self._called()
        sentences = [
            models.WaitView(pipeline_id=wait.pipeline_id, since=wait.since, text=wait.sentence(_clock(wait.since)))
            for wait in waits(self._control, called)
        ]
        return models.Overview(
            time=now,
            leased=sum(len(s.lease.devices) for s in self._control.leases if s.state is not LeaseState.PENDING),
            jobs=[view(keeper, job, now) for job in shown],
            more_jobs=len(running) + len(waiting) - len(shown),
            ended=[view(keeper, job, now) for job in keeper.ended(MOST_ENDED)],
            programs=programs[:MOST_PROGRAMS],
            more_programs=max(0, len(programs) - MOST_PROGRAMS),
            waits=sentences[:MOST_WAITS],
            more_waits=max(0, len(sentences) - MOST_WAITS),
            trouble=[*([self._control.trouble] if self._control.trouble else []), *map(str, self._control.endings)],
            usage=self._used(now),
        )

    def timeline(self, since: float, seconds: float) -> models.TimelineView:
        """Of the last `seconds`, of which those before `since` are known."""
        now, devices = self._now(), [device.id for device in self._control.devices]
        start = self._history.aligned(max(since, now - seconds), seconds)
        told = self._history.told(devices, start, now, seconds)
        called = self._called()
        return models.TimelineView(
            start=start,
            end=now,
            lanes=[models.LaneView(label=lane.label, devices=lane.devices) for lane in told.lanes],
            jobs={id: called.get(id, id) for id in told.pipelines},
            pipelines=list(told.pipelines),
            phases=list(told.phases),
            rows=[
                (lane, job, phase, round(a - start, 2), round(b - start, 2), share)
                for lane, job, phase, a, b, share in told.rows
            ],
        )

    async def run_of(self, job: Job, *, samples: bool) -> models.RunView:
        """`samples`: whether who asks may read them."""
        run_dir = self._keeper.work(job).run_dir
        reader, lock = self._readers.setdefault(run_dir, (RunReader(run_dir), asyncio.Lock()))
        self._readers.move_to_end(run_dir)
        while len(self._readers) > _READERS:
            self._readers.popitem(last=False)
        async with lock:
            try:
                curves = await asyncio.to_thread(reader.curves)
                texts = await asyncio.to_thread(reader.samples) if samples else []
            except OSError as error:
                raise RlixError(f"{run_dir} cannot be read: {error.strerror}") from error
        return models.RunView(
            job=view(self._keeper, job, self._now()),
            step=curves["step"],
            time=curves["time"],
            metrics=curves["metrics"],
            samples=[_sample(text) for text in texts],
            may_read=samples,
        )

    # -- below -------------------------------------------------------------------------------------------------------

    def _ahead(self, job: Job) -> int:
        wait = self._keeper.wait_of(job.id)
        return wait.ahead if wait is not None else 0

    def _called(self) -> dict[str, str]:
        """What people call each pipeline: a job of the queue with its number."""
        known = {id: name or id for id, name in self._names.items()}
        return known | {j.pipeline_id: f"{j.name} ({j.id})" for j in self._keeper.jobs.values() if j.pipeline_id}

    def _programs(self) -> list[models.ProgramView]:
        """What runs in the pool beside the queue's jobs."""
        mine = {job.pipeline_id for job in self._keeper.jobs.values()}
        held: dict[str, int] = {}
        phases: dict[str, dict[str, None]] = {}
        for status in self._control.leases:
            if status.state is not LeaseState.PENDING:
                lease = status.lease
                held[lease.pipeline_id] = held.get(lease.pipeline_id, 0) + len(lease.devices)
                phases.setdefault(lease.pipeline_id, {})[lease.phase.name.lower().replace("_", " ")] = None
        return [
            models.ProgramView(
                pipeline_id=p.pipeline_id,
                name=p.name or p.pipeline_id,
                phase=f"ending: {p.ending}"
                if p.ending
                else ", ".join(phases.get(p.pipeline_id, {})) or _idle(p.waiting),
                gpus=held.get(p.pipeline_id, 0),
                step=p.progress.step if p.progress else 0,
                steps=p.progress.steps if p.progress else 0,
                metrics=dict(p.progress.metrics) if p.progress else {},
            )
            for p in self._control.pipelines
            if p.pipeline_id not in mine
        ]

    def _used(self, now: float) -> list[models.TeamUsage]:
        """By team, of the last day."""
        if now - self._usage[0] >= _USAGE_EVERY_S:
            sums = self._accounts.by_team(now - _USAGE_S)
            self._usage = (
                now,
                [
                    models.TeamUsage(team=team, given_s=given, busy_s=busy, switching_s=switching)
                    for team, (given, busy, switching) in sorted(sums.items())
                ],
            )
        return self._usage[1]


def _idle(waiting: Sequence[str]) -> str:
    return f"waits for {', '.join(waiting)}" if waiting else "idle"


def _clock(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at).strftime("%H:%M:%S")


def _sample(text: SampleText) -> models.SampleView:
    return models.SampleView(
        step=text.step,
        evaluation=text.evaluation,
        prompt=printable(cut(text.prompt, head=False)),
        completion=printable(cut(text.completion)),
        reward=text.reward,
        end=printable(text.end),
        error=printable(text.error),
    )
