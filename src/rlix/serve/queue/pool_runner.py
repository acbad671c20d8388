"""Jobs of the queue on the pool of this machine's `RLIX_HOME`, or of the Ray cluster of `RAY_ADDRESS`."""

import contextlib
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rlix.control.announcement import find_or_start_daemon, is_claimed
from rlix.control.init import detach, init
from rlix.control.rpc import get, in_words
from rlix.control.settings import Settings
from rlix.monitor.records import ENDINGS, load_run
from rlix.pipeline.jobs.handle import BY_QUEUE, FINAL_STATES, JobHandle, find_jobs
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus, LeaseRecord, LeaseState
from rlix.scheduler.queue.jobs import Outcome
from rlix.serve.queue.runner import Control, Is, Seen, Work
from rlix.serve.queue.starter import is_starting, read_note

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 10.0
_OUTCOMES = {"finished": Outcome.FINISHED, "failed": Outcome.FAILED, "stopped": Outcome.CANCELLED}
_LOG = "starter.log"


class PoolRunner:
    """See `Runner`. Starts a control plane where none runs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._orchestrator: Any = None
        self._handles: dict[Path, JobHandle] = {}
        self._starters: dict[int, subprocess.Popen[bytes]] = {}

    def devices(self) -> int:
        with self._in_words():
            asked = self._attached().devices.remote()
            return len(get(asked, what="the pool's devices", timeout_s=_CALL_TIMEOUT_S))

    def control(self) -> Control:
        with self._in_words():
            asked = self._attached().status.remote()
            status: ControlStatus = get(asked, what="the control plane's status", timeout_s=_CALL_TIMEOUT_S)
        held: Counter[LeaseState] = Counter()
        for each in status.leases:
            held[each.state] += len(each.lease.devices)
        return Control(
            plans=status.plans,
            plan_s=status.plan_s,
            waiting=Counter(each.phase.name.lower() for each in status.waiting),
            leased=held[LeaseState.ACTIVE] + held[LeaseState.DRAINING],
            quarantined=held[LeaseState.QUARANTINED],
        )

    def leases(self, since: int) -> tuple[ControlStatus, Sequence[LeaseRecord]]:
        with self._in_words():
            orchestrator = self._attached()
            asked = orchestrator.status.remote(), orchestrator.leases_since.remote(since)
            status, records = get(list(asked), what="who holds what", timeout_s=_CALL_TIMEOUT_S)
            return status, records

    def start(self, work: Work) -> None:
        starter = self._starters.get(work.id)
        if starter is not None and starter.poll() is None:
            return
        with (work.folder / _LOG).open("ab") as log:
            self._starters[work.id] = subprocess.Popen(
                [sys.executable, "-m", "rlix.serve.queue.starter", work.folder, work.runs_dir, str(work.attempt)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it goes on when the service ends
                env=os.environ | {"RLIX_HOME": str(self._settings.home)},
            )

    def look(self, works: Sequence[Work]) -> Mapping[int, Seen]:
        with self._in_words():
            orchestrator = self._attached()
            notes = {work.run_dir: read_note(work.folder, work.attempt) for work in works}
            silent: set[str] = set()
            if any(note is not None and run_dir not in self._handles for run_dir, note in notes.items()):
                for job in find_jobs(orchestrator):
                    if job.run_dir is None:  # its coordinator does not answer now
                        silent.add(job.pipeline_id)
                    note = None if job.run_dir is None else notes.get(job.run_dir)
                    # The coordinator of an earlier attempt can still be asked for a minute.
                    if job.run_dir is not None and note is not None and _at(job.pipeline_id) >= _at(note.pipeline_id):
                        self._handles.setdefault(job.run_dir, job)
            return {work.id: self._seen(work, silent) for work in works}

    def stop(self, work: Work, why: str, *, now: bool) -> None:
        handle = self._handles.get(work.run_dir)
        if handle is not None:
            _stopped(work).write_text(why)
        with self._in_words():
            if handle is not None and now:
                handle.close(f"{BY_QUEUE}{why}")
            elif handle is not None:
                handle.stop(f"{BY_QUEUE}{why}")

    def _seen(self, work: Work, silent: Collection[str]) -> Seen:
        starter = self._starters.get(work.id)
        if (starter is not None and starter.poll() is None) or is_starting(work.folder):
            return Seen(Is.STARTING)
        if (note := read_note(work.folder, work.attempt)) is None:
            if starter is None:
                return Seen(Is.ABSENT)
            self._starters.pop(work.id)
            why = f"could not be started: its starter ended with {starter.returncode}; see {work.folder / _LOG}"
            return Seen(Is.ENDED, outcome=Outcome.FAILED, why=why, by_pool=True)
        self._starters.pop(work.id, None)
        if note.error:
            return Seen(Is.ENDED, outcome=Outcome.FAILED, why=note.error, by_pool=not note.mistake)
        handle = self._handles.get(work.run_dir)
        if handle is None and note.pipeline_id in silent:
            return Seen(Is.RUNNING, note.pipeline_id, "does not answer")
        if handle is None:
            return self._without_coordinator(work)
        status = handle.status()
        if status.state not in FINAL_STATES:
            return Seen(Is.RUNNING, handle.pipeline_id, status.phase, status.step, status.steps)
        self._handles.pop(work.run_dir)
        ended = Seen(
            Is.ENDED,
            handle.pipeline_id,
            step=status.step,
            steps=status.steps,
            outcome=_OUTCOMES[status.state],
            why=status.error or "",
            by_pool=status.by_pool,
        )
        return _by_whom(work, ended)

    def _without_coordinator(self, work: Work) -> Seen:
        """How it ended, by its run folder: it did so long ago, or its pool is gone."""
        with contextlib.suppress(ValueError, OSError):  # a job may write there what it likes
            record = load_run(work.run_dir)
            last = max(record.job_events, key=lambda event: event.time, default=None)
            if last is not None and last.event in ENDINGS and last.time > work.admitted_at:
                return _by_whom(work, Seen(Is.ENDED, outcome=_OUTCOMES[last.event], why=last.detail or ""))
        why = "its pool ended before it did"
        return Seen(Is.ENDED, outcome=Outcome.FAILED, why=why, by_pool=True)

    def _attached(self) -> Any:
        """The orchestrator; of a daemon that has died, of another one."""
        settings = self._settings
        if self._orchestrator is not None and (settings.ray_address or is_claimed(settings.home)):
            return self._orchestrator
        if self._orchestrator is not None:
            self._leave()
        if settings.ray_address:
            self._orchestrator = init(settings=settings, log_level="WARNING")
        else:
            find_or_start_daemon(settings.home, settings.virtual_gpus)
            self._orchestrator = init(
                create_if_missing=False, settings=replace(settings, ray_address=""), log_level="WARNING"
            )
        return self._orchestrator

    def _leave(self) -> None:
        self._orchestrator = None
        self._handles.clear()
        detach()

    @contextlib.contextmanager
    def _in_words(self) -> Any:
        try:
            yield
        except RayError as error:
            if not ray.is_initialized():
                self._leave()
            raise RlixError(f"the pool does not answer: {in_words(error)}") from error


def _stopped(work: Work) -> Path:
    """Holds why the queue had this attempt stopped: in its folder, which no backup of the queue turns back."""
    return work.folder / f"stopped-{work.attempt}"


def _by_whom(work: Work, ended: Seen) -> Seen:
    """Of one that was stopped: for the queue, or by somebody who did not ask the queue."""
    if ended.outcome is not Outcome.CANCELLED:
        return ended
    with contextlib.suppress(OSError):
        return replace(ended, for_queue=_stopped(work).read_text())
    return replace(ended, why=ended.why or "it was stopped, and not by the queue")


def _at(pipeline_id: str) -> int:
    """The order in which a pool gave its ids: "ft_12" is the twelfth."""
    number = pipeline_id.rpartition("_")[2]
    return int(number) if number.isdecimal() else 0
