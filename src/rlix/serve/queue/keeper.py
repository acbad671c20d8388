"""Turns decisions into jobs that run: looks at what runs, writes down what has become of it, decides, and acts.

Level-triggered: a turn needs nothing of the turn before, so the first one after a restart is one like any other.
Whatever is done was written down first, and may be done again.
"""

import asyncio
import contextlib
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlix.node.run_folder import QUEUED
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus, LeaseRecord
from rlix.scheduler.queue.decide import STOP_S, Decision, decide
from rlix.scheduler.queue.fair_share import Usage
from rlix.scheduler.queue.jobs import PRIORITY_NAMES, Job, Outcome, Pool, QueueError, Snapshot, State, Stop
from rlix.scheduler.queue.reasons import Wait
from rlix.serve.queue.config import QueueSpec
from rlix.serve.queue.runner import Control, Is, Runner, Seen, Work
from rlix.serve.queue.store import DRAINED, Change, Store

logger = logging.getLogger(__name__)
T = TypeVar("T")

TURN_S = 1.0
GATHER_S = 0.2
"""After something was asked, for more of it: a turn is for all."""
FAILURES = 5
"""So often in a row a job is tried again that failed for the pool's reasons."""
_STEADY_S = 600.0  # who ran for so long has not failed in a row
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 1800.0
_ASK_AGAIN_S = 10.0  # for a stop
KEPT_DAYS = 30
"""After its end so long a job's files are kept, and it can be queued again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a submission says of itself; whose it is, its token says."""

    name: str
    gpus: int
    priority: int = 0
    preemptible: bool = True
    limit_s: float | None = None
    held: bool = False
    webhook: str = ""


class Keeper:
    """Belongs to one event loop; only `Runner` calls leave it, for a thread of their own."""

    def __init__(
        self, store: Store, runner: Runner, config: QueueSpec, home: Path, runs_dir: Path, *, now: Callable[[], float]
    ) -> None:
        self._store, self._runner, self._config, self._now = store, runner, config, now
        self._home, self._runs_dir = home, runs_dir
        self._thread = ThreadPoolExecutor(1, "runner")
        self._jobs = {job.id: job for job in store.jobs()}
        self._next_id = store.next_id()
        self._seen: dict[int, Seen] = {}
        self._asked_to_stop: dict[int, float] = {}
        self._devices = 0
        self._pool_why = "it has not been looked at yet"
        self.control: Control | None = None
        """What the control plane has said of itself when `look_at_control` was asked last; None: nothing."""
        self._changed = asyncio.Event()
        self._decision = Decision((), (), {})
        self.drained = store.setting(DRAINED)
        """Who wants nothing to start; "": nobody."""
        self.on_end: Callable[[Job], None] = lambda _: None
        self._undecided: set[int] = set()  # something was asked of them since
        self.usage = Usage(config.half_life_h * 3600.0)

    # -- what may be asked -------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> Mapping[int, Job]:
        """Those that have not ended."""
        return self._jobs

    @property
    def pool(self) -> Pool:
        return Pool(self._devices, self._config.jobs_per_gpu)

    @property
    def pool_why(self) -> str:
        """Why there is no pool; "" when there is."""
        return self._pool_why

    async def leases(self, since: int) -> tuple[ControlStatus, Sequence[LeaseRecord]]:
        """See `Runner.leases`."""
        return await self._call(self._runner.leases, since)

    async def look_at_control(self) -> None:
        """Raises RlixError: there is no pool now."""
        try:
            self.control = await self._call(self._runner.control)
        except RlixError:
            self.control = None
            raise

    def job(self, id: int) -> Job | None:
        return self._jobs.get(id) or self._store.job(id)

    def ended(self, most: int, *, since: float = 0.0, owner: str | None = None) -> list[Job]:
        """See `Store.ended`."""
        return self._store.ended(most, since=since, owner=owner)

    def changes(self, id: int) -> list[Change]:
        return self._store.changes(id)

    def note(self, id: int, what: str) -> None:
        """Among what has happened to a job."""
        self._store.put([], [Change(self._now(), id, "", what)])

    def seen(self, id: int) -> Seen | None:
        """What a running job does, as of the last look."""
        return self._seen.get(id)

    def wait_of(self, id: int) -> Wait | None:
        """Why a job waits, as of the last turn or of now; None when it does not."""
        if id in self._jobs and (id in self._undecided or id not in self._decision.waits):
            self._decide()
        return self._decision.waits.get(id)

    def foresee(self, job: Job) -> Wait | None:
        """Why a job would wait that is not submitted; None when it would start at once."""
        return decide(self.snapshot(job)).waits.get(job.id)

    def _decide(self) -> Decision:
        self._decision = decide(self.snapshot())
        self._undecided.clear()
        return self._decision

    def snapshot(self, *more: Job) -> Snapshot:
        now = self._now()
        jobs = (*self._jobs.values(), *more)
        teams = {name: self._config.team(name) for name in self._config.teams}
        return Snapshot(now, self.pool, jobs, teams, self.usage.at(now), self.drained)

    def draft(self, asked: Asked, owner: str, team: str) -> Job:
        """The job that a submission would become."""
        limit = asked.limit_s or (self._config.limit_h and self._config.limit_h * 3600.0) or math.inf
        return Job(
            self._next_id,
            asked.name,
            owner,
            team,
            asked.gpus,
            self._now(),
            priority=asked.priority,
            preemptible=asked.preemptible,
            limit_s=limit,
            state=State.HELD if asked.held else State.SUBMITTED,
            since=self._now(),
            why=owner if asked.held else "",
            webhook=asked.webhook,
        )

    def submit(self, asked: Asked, owner: str, team: str, files: Mapping[str, bytes], key: str | None) -> Job:
        """A new job, which is on disk; the one there is where the same was asked before under this key."""
        if key is not None and (known := self._store.by_key(key)) is not None:
            return self._jobs.get(known.id, known)
        self._check_room(owner)
        job = self.draft(asked, owner, team)
        self._store.add(job, key, files, Change(job.since, job.id, owner, "submitted"))
        self._jobs[job.id] = job
        self._next_id += 1
        self._poke(job)
        return job

    def _check_room(self, owner: str) -> None:
        most, has = self._config.most_jobs, sum(job.owner == owner for job in self._jobs.values())
        if has >= most:
            raise QueueError(
                f"{owner} has {has} jobs that have not ended, and may have {most} (most_jobs in queue.yaml)"
            )

    def cancel(self, job: Job, by: str) -> Job:
        """It ends: at once when it waits, after a checkpoint when it runs."""
        if job.state is State.ENDED:
            raise QueueError(f"job {job.id} ({job.name}) has ended ({job.outcome})")
        why = f"cancelled by {by}"
        if not job.active:
            return self._put(replace(job.become(State.ENDED, self._now(), why), outcome=Outcome.CANCELLED), by, why)
        return self._put(replace(job, stop=Stop(self._stops_since(job), why, Outcome.CANCELLED)), by, why)

    def hold(self, job: Job, by: str) -> Job:
        """It waits until it is released."""
        return self._put(job.become(State.HELD, self._now(), by), by, "held")

    def release(self, job: Job, by: str) -> Job:
        if job.state is not State.HELD:
            raise QueueError(f"job {job.id} ({job.name}) is {job.state}, not held")
        return self._put(replace(job.become(State.SUBMITTED, self._now()), not_before=0.0), by, "released")

    def requeue(self, job: Job, by: str) -> Job:
        """One that has ended is queued again, and goes on from its checkpoint; one that runs is stopped for that."""
        why = f"queued again by {by}"
        if job.state is State.HELD:
            raise QueueError(f"job {job.id} ({job.name}) is held, by {job.why}: release it")
        if job.active:
            return self._put(replace(job, stop=Stop(self._stops_since(job), why)), by, why)
        if job.outcome is Outcome.FINISHED:
            raise QueueError(f"job {job.id} ({job.name}) has finished: it has done all its steps")
        if not self._store.files(job.id):
            raise QueueError(
                f"job {job.id} ({job.name}) ended long ago: its files were kept {KEPT_DAYS} days; submit it"
            )
        if job.state is State.ENDED:
            self._check_room(job.owner)
        return self._put(self._again(job.become(State.SUBMITTED, self._now(), why)), by, why)

    def drain(self, by: str, *, requeue: bool) -> None:
        """Nothing starts until `resume`, also after a restart. `requeue`: what runs writes a checkpoint, ends, and
        waits with the others."""
        self._store.set(DRAINED, by)
        self.drained = by
        for job in list(self._jobs.values()) if requeue else ():
            if job.active and job.stop is None:
                why = f"the queue was drained by {by}"
                self._put(replace(job, stop=Stop(self._now(), why)), by, why)
        self._decide()
        self._changed.set()

    def resume(self) -> None:
        self._store.set(DRAINED, "")
        self.drained = ""
        self._decide()
        self._changed.set()

    def _stops_since(self, job: Job) -> float:
        """Asked again, it has no more time for its checkpoint."""
        return self._now() if job.stop is None else job.stop.at

    def set_priority(self, job: Job, priority: int, by: str) -> Job:
        if job.state is State.ENDED:
            raise QueueError(f"job {job.id} ({job.name}) has ended ({job.outcome})")
        return self._put(replace(job, priority=priority), by, f"priority {PRIORITY_NAMES.get(priority, priority)}")

    def work(self, job: Job) -> Work:
        """Where a job's files are, and its run folder: nobody else's, also of other jobs of that name."""
        runs = self._runs_dir / str(job.id)
        return Work(job.id, job.name, self._folder(job.id), runs, job.requeues, job.admitted_at)

    def forget_files(self) -> None:
        """Of jobs that ended long ago."""
        old = self._store.with_files(self._now() - KEPT_DAYS * 86400.0)
        for id in old:
            shutil.rmtree(self._folder(id), ignore_errors=True)
        self._store.drop_files(old)

    def _folder(self, id: int) -> Path:
        return self._home / "queue" / str(id)

    # -- turns -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._changed.clear()
            try:
                await self.turn()
            except (RlixError, OSError) as error:  # a full disk, say: what cannot be written down is not done
                logger.error("the queue cannot go on now: %s", error)
            await asyncio.sleep(GATHER_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TURN_S)

    async def turn(self) -> None:
        """Looks, writes down, decides, and acts."""
        works = [self.work(job) for job in self._jobs.values() if job.active]
        try:
            self._devices = await self._call(self._runner.devices)
            found = await self._call(self._runner.look, works)
            self._pool_why = ""
        except RlixError as error:
            self._pool_why, found = str(error), {}
        self._take_in({work.id: work for work in works}, found)
        if self._pool_why:
            return
        await self._stop_those_to_stop()
        snapshot = self.snapshot()
        self._undecided.clear()
        self._decision = await self._call(decide, snapshot)  # others are answered meanwhile
        self._carry_out(self._decision, {job.id: job for job in snapshot.jobs})
        await self._start_those_to_start()
        await self._stop_those_to_stop()

    async def _call(self, what: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, what, *arguments)

    def _take_in(self, works: Mapping[int, Work], found: Mapping[int, Seen]) -> None:
        now, jobs, changes = self._now(), [], []
        for id, it in found.items():
            job = self._jobs.get(id)
            if job is None or not job.active or job.requeues != works[id].attempt:
                continue
            seen = replace(it, why=printable(it.why), phase=printable(it.phase))
            last = seen if seen.steps else self._seen.get(id, seen)  # who is gone does not say how far it was
            self._seen[id] = replace(seen, step=last.step, steps=last.steps)
            after = self._after(job, seen, now)
            if after is not job:
                after = replace(after, step=last.step, steps=last.steps) if last.steps else after
                jobs.append(after)
                what = after.why or (after.outcome or after.state)
                changes.append(Change(now, id, "", f"{after.state}: {what}" if after.why else str(what)))
        for job in self._jobs.values():
            over = job.state is State.RUNNING and job.stop is None and now >= job.admitted_at + job.limit_s
            if over and job.id not in {after.id for after in jobs}:
                why = f"its time limit of {duration(job.limit_s)} is over"
                jobs.append(replace(job, stop=Stop(now, why, Outcome.TIMEOUT)))
                changes.append(Change(now, job.id, "", why))
        self._keep(jobs, changes)

    def _after(self, job: Job, seen: Seen, now: float) -> Job:
        """What a job has become, by what is seen of it."""
        if seen.state is Is.RUNNING and (job.state is State.ADMITTED or job.pipeline_id != seen.pipeline_id):
            running = job if job.state is State.RUNNING else job.become(State.RUNNING, now)
            return replace(running, pipeline_id=seen.pipeline_id, stop=job.stop)
        if seen.state is not Is.ENDED and not (seen.state is Is.ABSENT and job.stop is not None):
            return job
        stop, outcome, why = job.stop, seen.outcome, seen.why
        if outcome is not Outcome.FINISHED and stop is not None:
            if stop.outcome is None:
                return self._again(job.become(State.SUBMITTED, now, stop.why))
            outcome, why = stop.outcome, stop.why
        elif seen.for_queue:
            return self._again(job.become(State.SUBMITTED, now, seen.for_queue))
        elif seen.by_pool:
            failures = 1 + (job.failures if now - job.admitted_at < _STEADY_S else 0)
            if failures < FAILURES:
                pause = min(_FIRST_PAUSE_S * 2.0 ** (failures - 1), _LONGEST_PAUSE_S)
                again = self._again(job.become(State.SUBMITTED, now, why))
                return replace(again, failures=failures, not_before=now + pause)
            why = f"{why}; the {failures}th time in a row"
        return replace(job.become(State.ENDED, now, why), outcome=outcome)

    def _again(self, job: Job) -> Job:
        return replace(job, requeues=job.requeues + 1, pipeline_id="", outcome=None, failures=0, not_before=0.0)

    def _carry_out(self, decision: Decision, decided: Mapping[int, Job]) -> None:
        """For those that still are what was decided for."""
        now, jobs, changes = self._now(), [], []
        same = {id for id, job in decided.items() if self._jobs.get(id) is job}
        for one in decision.preempt:
            if not {one.victim, one.for_id} <= same:
                continue
            victim, winner = self._jobs[one.victim], self._jobs[one.for_id]
            why = f"preempted for {winner.said}"
            jobs.append(replace(victim, stop=Stop(now, why, for_id=winner.id)))
            changes.append(Change(now, victim.id, "", why))
        for id in same.intersection(decision.admit):
            jobs.append(replace(self._jobs[id].become(State.ADMITTED, now), admitted_at=now))
            changes.append(Change(now, id, "", "admitted"))
        self._keep(jobs, changes)

    async def _start_those_to_start(self) -> None:
        for job in list(self._jobs.values()):
            seen = self._seen.get(job.id)
            if job.state is State.ADMITTED and (seen is None or seen.state is Is.ABSENT):
                work, files = self.work(job), self._store.files(job.id)
                self._seen[job.id] = Seen(Is.STARTING)
                try:
                    await self._call(self._begin, work, files)
                except (RlixError, OSError) as error:  # its own trouble: the others have their turn
                    logger.error("%s cannot be started now, and will be tried again: %s", job.said, error)
                    self._seen.pop(job.id)

    def _begin(self, work: Work, files: Mapping[str, bytes]) -> None:
        for folder in (work.folder, work.runs_dir):  # whose it is, reads what is in it, and nobody else
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        (work.runs_dir / QUEUED).write_text(f"{work.id}\n")
        for path, content in files.items():
            target = work.files / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        self._runner.start(work)

    async def _stop_those_to_stop(self) -> None:
        """Until it has ended: it may not have heard. Who has had its time for a checkpoint is ended without."""
        now = self._now()
        for job in list(self._jobs.values()):
            if job.state is not State.RUNNING or job.stop is None:
                continue
            if now < self._asked_to_stop.get(job.id, 0.0) + _ASK_AGAIN_S:
                continue
            self._asked_to_stop[job.id] = now
            late = now >= job.stop.at + STOP_S
            try:
                await self._call(partial(self._runner.stop, self.work(job), job.stop.why, now=late))
            except RlixError as error:
                logger.warning("%s: %s", job.said, error)

    def _put(self, job: Job, by: str, what: str) -> Job:
        self._keep([job], [Change(self._now(), job.id, by, what)])
        self._poke(job)
        return job

    def _keep(self, jobs: Sequence[Job], changes: Sequence[Change]) -> None:
        """On disk first."""
        if not jobs:
            return
        self._store.put(jobs, changes)
        for job in jobs:
            if not job.active:
                self._seen.pop(job.id, None)
                self._asked_to_stop.pop(job.id, None)
            if job.state is State.ENDED:
                self._jobs.pop(job.id, None)
                self.on_end(job)
            else:
                self._jobs[job.id] = job

    def _poke(self, job: Job) -> None:
        self._undecided.add(job.id)
        self._changed.set()


def printable(text: str) -> str:
    """What a job said of itself, such as a file's name that is no text: as JSON can say it."""
    return text.encode(errors="replace").decode()


def duration(seconds: float) -> str:
    """ "90 s", "5 min", "1.5 h"."""
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    return f"{seconds / 60.0:.3g} min" if seconds < 7200.0 else f"{seconds / 3600.0:.3g} h"
