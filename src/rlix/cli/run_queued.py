"""`rlix run` where a service keeps the queue: submit, and watch to the end."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from rlix.cli.outcome import exit_code, print_failures, print_json, print_report, write_reports
from rlix.cli.queue import FOLLOW_TRIES, Wish, sentence, submit_all
from rlix.cli.view import make_console
from rlix.cli.watch import LOG_EVERY_S, STOPS, Interrupts, KilledError
from rlix.control.settings import Settings
from rlix.protocol.errors import SpecError
from rlix.serve.api import models
from rlix.serve.api.client import UnreachableError, connect

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus

logger = logging.getLogger(__name__)

POLL_S = 1.0
_STATES = {"finished": "finished", "failed": "failed", "cancelled": "stopped", "timeout": "stopped"}


class Queue(Protocol):
    """What is needed of a `Client`."""

    def job(self, id: int) -> models.JobView: ...

    def post(self, path: str, answer: type[models.JobView]) -> models.JobView: ...


def served() -> bool:
    """Whether a service keeps the queue here, or where RLIX_SERVER says.

    Raises:
        SpecError: RLIX_SERVER is set, and there is no token for it.
        UnreachableError: it is set, and nobody answers there.
    """
    meant, settings = bool(os.environ.get("RLIX_SERVER")), Settings.from_env()
    if settings.ray_address == "local":
        return False
    try:
        with contextlib.closing(connect(settings.home)) as client:
            client.get("/v1/pool", models.PoolView)
    except (SpecError, UnreachableError):
        if meant:
            raise
        return False
    return True


def run_queued(specs: Sequence[str], given: tuple[str, ...], *, as_json: bool) -> int:
    """Submits the jobs, follows them to their end and reports; returns the exit code. Ctrl-C cancels them."""
    console, interrupts = make_console(stderr=as_json), Interrupts()
    client, jobs = submit_all(specs, Wish(given=given))
    ids = ", ".join(f"{job.name} ({job.id})" for job in jobs)
    _say(console, f"submitted to the queue that runs here: {ids}. Ctrl-C cancels; past the queue: --private")
    with interrupts.handled():
        try:
            jobs = follow(client, jobs, console, interrupts)
        except KilledError:
            _say(console, "left; the queue ends what was cancelled")
    statuses = [_status(job) for job in jobs]
    run_dirs = [Path(job.run_dir) for job in jobs]
    there = [run_dir for run_dir in run_dirs if run_dir.is_dir()]  # of a service on another machine they are not here
    report = None
    if there:
        try:
            report = write_reports(there, Path(os.path.commonpath([run_dir.parent for run_dir in there])))
        except OSError as error:  # the folders are the service's
            _say(console, f"no report: {error}")
    if as_json:
        print_json(report, statuses, Path())
    elif report is not None and len(there) == len(jobs):
        print_report(report, statuses, run_dirs, there[0].parent, console)
    else:
        for job in jobs:
            _say(console, f"{job.name} ({job.id}): {sentence(job)}")
    print_failures(statuses)
    return exit_code(statuses, interrupts.signal_number)


def follow(
    client: Queue,
    jobs: Sequence[models.JobView],
    console: Console,
    interrupts: Interrupts,
    now_s: Callable[[], float] = time.monotonic,
) -> list[models.JobView]:
    """Until all have ended. The first interrupt cancels them; a service that is away is asked again for ten minutes."""
    last = {job.id: job for job in jobs}
    said: dict[int, tuple[str, str, float]] = {}
    cancelled, tries = False, 0
    while True:
        try:
            if interrupts.stop_wanted and not cancelled:
                interrupts.wake.clear()
                _say(console, f"cancelling: {STOPS} (Ctrl-C again to leave)")
                for id, job in last.items():
                    if job.state != "ended":
                        with contextlib.suppress(SpecError):  # it has ended meanwhile
                            last[id] = client.post(f"/v1/jobs/{id}/cancel", models.JobView)
                cancelled = True
            last = {id: job if job.state == "ended" else client.job(id) for id, job in last.items()}
            tries = 0
        except UnreachableError as error:
            tries += 1
            if tries > FOLLOW_TRIES:
                raise
            if tries == 1:
                logger.warning("%s; asked again for %.0f minutes", error, FOLLOW_TRIES * POLL_S / 60)
        for job in last.values():
            state, text, at = said.get(job.id, ("", "", float("-inf")))
            line = f"{job.name} ({job.id}): {sentence(job)}"
            if job.state != state or (line != text and now_s() - at >= LOG_EVERY_S):
                _say(console, line)
                said[job.id] = (job.state, line, now_s())
        if all(job.state == "ended" for job in last.values()):
            return list(last.values())
        interrupts.wake.wait(POLL_S)


def _status(job: models.JobView) -> "JobStatus":
    from rlix.pipeline.jobs.status import JobStatus

    state = _STATES.get(job.outcome or "", job.state)
    why = job.reason if state in ("failed", "stopped") else None
    return JobStatus(job.name, job.pipeline_id, state, job.step, job.steps, job.phase or state, error=why)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
