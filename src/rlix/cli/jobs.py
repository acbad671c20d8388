"""`rlix status`, `watch`, `stop` and `down`: jobs that somebody else may have started."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray
from ray.exceptions import RayError
from rich.console import Console

from rlix.cli.answers import DownAnswer, JobsAnswer, StatusAnswer, print_answer
from rlix.cli.hosts import host_lines
from rlix.cli.outcome import exit_code, print_failures, print_json, print_report, write_reports
from rlix.cli.pool import STATUS_TIMEOUT_S, Pool, StatusSource, elsewhere, running_pool
from rlix.cli.programs import AttachedProgram, asking, find_programs, progress_line
from rlix.cli.said_status import job_answer, status_answer
from rlix.cli.text import clock, count
from rlix.cli.view import Snapshot, make_console, render
from rlix.cli.watch import FINAL_STATES, STOP_TIMEOUT_S, STOPS, Interrupts, screen_on, watch
from rlix.control.announcement import (
    Announcement,
    await_end,
    await_start,
    is_claimed,
    log_path,
    note_end,
    read_announcement,
)
from rlix.control.daemon import other_programs
from rlix.control.init import shutdown
from rlix.control.ray_processes import RayProcesses
from rlix.control.rpc import in_words
from rlix.control.settings import Settings
from rlix.monitor.waits import waits, words
from rlix.pipeline.jobs.handle import STOPPED_BY, JobHandle, find_jobs
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError
from rlix.protocol.messages import NodeStatus

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus

logger = logging.getLogger(__name__)

LocalJob = JobHandle | AttachedProgram
LEAVE_TIMEOUT_S = 15.0
DOWN_TIMEOUT_S = 60.0
POLL_S = 0.3
_DOWN = "`rlix down`"
EXIT_FAILED = 1


def show_status(*, as_json: bool = False) -> int:
    """Print what runs, and who holds what."""
    console = make_console()
    with running_pool(Settings.from_env()) as pool:
        if pool is None:
            print_answer(StatusAnswer(running=False, said=_nothing_runs())) if as_json else _say_nothing_runs(console)
            return 0
        asked = pool.orchestrator.nodes.remote()
        source = StatusSource(pool)
        before, jobs, control = source(), find_jobs(pool.orchestrator), source()
        statuses = tuple(job.known for job in jobs)
        launched = {job.pipeline_id for job in jobs}
        there = {pipeline.pipeline_id for pipeline in before.pipelines}  # others began after the jobs were looked for
        programs = [pipeline for pipeline in control.pipelines if pipeline.pipeline_id in there - launched]
        if as_json:
            hosts: tuple[NodeStatus, ...] = ()
            with contextlib.suppress(RayError):
                hosts = ray.get(asked, timeout=STATUS_TIMEOUT_S)
            print_answer(status_answer(pool.said, jobs, programs, control, hosts))
            return 0
        elapsed_s = time.time() - pool.daemon.started if pool.daemon else 0.0
        sentences = tuple(
            wait.sentence(_time_of_day(wait.since))
            for wait in waits(control, {status.pipeline_id: status.name for status in statuses})
        )
        _say(console, pool.said)
        console.print(render(Snapshot(statuses, control, elapsed_s, None, stalls=sentences)))
        for job, status in zip(jobs, statuses, strict=True):
            again = f", started again {status.resumes} times after a node left" if status.resumes else ""
            # It has not said yet in which folder; and why it waits may be longer than the table has room for.
            unknown = f", {words(status.phase)}" if status.state == "starting" else ", no run folder"
            where = f", {job.run_dir}" if job.run_dir else unknown
            _say(console, f"{status.name} ({job.pipeline_id}): {status.state}{again}{where}")
        for program in programs:
            state = f"ending: {program.ending}" if program.ending else "a program of its own"
            said = f"{state}{progress_line(program.progress)}"
            _say(console, f"{program.name or program.pipeline_id} ({program.pipeline_id}): {said}")
        with contextlib.suppress(RayError):
            for line in host_lines(ray.get(asked, timeout=STATUS_TIMEOUT_S)):
                _say(console, line)
        for ending in control.endings:
            _say(console, f"ended at {_time_of_day(ending.time)}: {ending}")
    return 0


def watch_jobs(names: Sequence[str], *, live: bool, as_json: bool = False) -> int:
    """Follow jobs to their end, whoever started them, and report. Ctrl-C leaves; the jobs go on."""
    console, interrupts = make_console(stderr=as_json), Interrupts()
    with running_pool(Settings.from_env()) as pool:
        jobs = [] if pool is None else select(_all_jobs(pool), names)
        if pool is None or not jobs:
            _say(console, "no job runs here") if pool else _say_nothing_runs(console)
            return EXIT_FAILED if names else 0
        with interrupts.handled(), screen_on(console, live=live and not as_json) as screen:
            statuses = watch(jobs, StatusSource(pool), screen, interrupts, time.monotonic, only_look=True)
    if any(status.state not in FINAL_STATES for status in statuses):
        going = ", ".join(status.name for status in statuses if status.state not in FINAL_STATES)
        _say(console, f"left; still running: {going}. Stop them with `rlix stop`.")
        return 0
    _report(jobs, statuses, console, as_json=as_json)
    print_failures(statuses)
    return exit_code(statuses, None)


def stop_jobs(names: Sequence[str], *, everything: bool, now: bool, as_json: bool = False) -> int:
    """Have jobs write a checkpoint and end, or end at once; returns when they have."""
    if bool(names) == everything:
        raise SpecError("rlix stop: name jobs, or say --all")
    console = make_console(stderr=as_json)
    with running_pool(Settings.from_env()) as pool:
        if pool is None:
            _say_nothing_runs(console)
            if as_json:
                print_answer(JobsAnswer(jobs=()))
            return 0 if everything else EXIT_FAILED
        # Whoever says "all" means the jobs that have checkpoints to write; a program is ended when it is named.
        jobs = select(_all_jobs(pool) if names else find_jobs(pool.orchestrator), names)
        by = "`rlix stop --now`" if now else "`rlix stop`"
        ended = _stop(jobs, console, by, now=now)
        if as_json:
            print_answer(JobsAnswer(jobs=tuple(job_answer(job.status(), job.run_dir) for job in jobs)))
        return 0 if ended else EXIT_FAILED


def take_down(*, as_json: bool = False) -> int:
    """Stop every job, then end the control plane, whatever of it is dead or stopped."""
    console, settings = make_console(stderr=as_json), Settings.from_env()
    said = _taken_down(console, settings)
    if as_json:
        print_answer(DownAnswer(ended=bool(said), said=said or _nothing_runs()))
    elif said:
        _say(console, said)
    else:
        _say_nothing_runs(console)
    return 0


def _taken_down(console: Console, settings: Settings) -> str:
    """What was ended; "" where nothing runs."""
    if elsewhere(settings):
        return _leave_cluster(settings, console)
    if read_announcement(settings.home) is None and is_claimed(settings.home):
        _say(console, "a control plane is starting here: waiting for it to be ready, to end it")
        await_start(settings.home)
    found = read_announcement(settings.home)
    if found is None:
        return ""
    try:
        with running_pool(settings) as pool:
            if pool is not None:
                _stop(find_jobs(pool.orchestrator), console, _DOWN)
                # Ray ends the programs that are attached to it: they should have reported by then.
                _wait(lambda: not set(other_programs()) - {found.pid}, LEAVE_TIMEOUT_S)
    except (RlixError, RayError) as error:
        logger.warning("%s; ending it all the same", in_words(error) if isinstance(error, RayError) else error)
    note_end(settings.home, found, f"ended by {_DOWN}")
    _end(found, settings)
    return f"ended the control plane of process {found.pid}"


def _leave_cluster(settings: Settings, console: Console) -> str:
    with running_pool(settings) as pool:
        if pool is None:
            return ""
        _stop(find_jobs(pool.orchestrator), console, _DOWN)
        # Who followed a job removes its coordinator once it has reported.
        _wait(lambda: not find_jobs(pool.orchestrator), LEAVE_TIMEOUT_S)
        for job in find_jobs(pool.orchestrator):
            job.close(f"{STOPPED_BY}{_DOWN}")
        shutdown()
        return f"ended {pool.said}; its Ray goes on"


def _end(found: Announcement, settings: Settings) -> None:
    """Tells the daemon to end, and ends it and its Ray where that does not help, or cannot."""
    try:
        daemon = psutil.Process(found.pid)
        processes = RayProcesses(daemon)
        stopped = any(p.status() == psutil.STATUS_STOPPED for p in (daemon, *daemon.children()))
        daemon.send_signal(signal.SIGKILL if stopped else signal.SIGTERM)
    except psutil.NoSuchProcess:
        return
    with contextlib.suppress(WaitTimeoutError):
        await_end(settings.home, DOWN_TIMEOUT_S)
    if is_claimed(settings.home):
        logger.warning("process %d does not end by itself: killing it; see %s", found.pid, log_path(settings.home))
        with contextlib.suppress(psutil.NoSuchProcess):
            daemon.kill()
    processes.end(0.0 if stopped else LEAVE_TIMEOUT_S)
    await_end(settings.home, LEAVE_TIMEOUT_S)


def _stop(jobs: Sequence[LocalJob], console: Console, by: str, *, now: bool = False) -> bool:
    """Whether each has ended. `by`: which command it was, for those who follow them."""
    running = [job for job in jobs if job.status().state not in FINAL_STATES]
    for job in running:
        if now:
            job.close(f"{STOPPED_BY}{by}")
            _say(console, f"{job.name} ({job.pipeline_id}): ended")
        else:
            job.stop(f"{STOPPED_BY}{by}")
    if now or not running:
        return True
    _say(console, f"stopping {count(len(running), 'job')}: {STOPS}, attached programs without one")
    start = time.monotonic()

    def ended() -> bool:
        for job in list(running):
            status = job.status()
            if status.state in FINAL_STATES:
                running.remove(job)
                after = clock(time.monotonic() - start)
                at = f" at step {status.step}" if status.progress else ""
                _say(console, f"{after} {job.name} ({job.pipeline_id}): {status.state}{at}")
        return not running

    if _wait(ended, STOP_TIMEOUT_S):
        return True
    left = ", ".join(f"{job.name} ({job.status().phase})" for job in running)
    _say(console, f"no clean stop within {STOP_TIMEOUT_S:.0f} s of: {left}; `rlix stop --now` ends them at once")
    return False


def _all_jobs(pool: Pool) -> list[LocalJob]:
    jobs = find_jobs(pool.orchestrator)
    return [*jobs, *find_programs(StatusSource(pool), {job.pipeline_id for job in jobs}, asking(pool.orchestrator))]


def select(jobs: Sequence[LocalJob], names: Sequence[str]) -> list[LocalJob]:
    """The jobs with these names or pipeline ids; without any, those that have not ended."""
    if not names:
        return [job for job in jobs if job.status().state not in FINAL_STATES]
    chosen: list[LocalJob] = []
    for name in names:
        found = [job for job in jobs if name in (job.pipeline_id, job.name)]
        if len(found) > 1:
            found = [job for job in found if job.status().state not in FINAL_STATES]
        if len(found) != 1:
            ids = ", ".join(_told_apart(job) for job in found or jobs)
            what = "several jobs have that name, name one by its id" if found else "no such job runs here"
            raise SpecError(f"{name}: {what}; there are: {ids or 'none'}")
        chosen += [job for job in found if job not in chosen]
    return chosen


def _told_apart(job: LocalJob) -> str:
    status = job.status()
    step = f", step {status.progress}" if status.progress else ""
    return f"{job.pipeline_id} ({job.name}{step}{f', in {job.run_dir}' if job.run_dir else ''})"


def _report(
    jobs: Sequence[LocalJob], statuses: Sequence["JobStatus"], console: Console, *, as_json: bool = False
) -> None:
    ended = [(job.run_dir, status) for job, status in zip(jobs, statuses, strict=True) if job.run_dir is not None]
    if not ended:
        if as_json:
            print_json(None, statuses, Path("runs"))
        return
    run_dirs = [Path(status.moved_to or run_dir) for run_dir, status in ended]
    runs_dir = Path(os.path.commonpath([run_dir.parent for run_dir in run_dirs]))
    try:
        report = write_reports(run_dirs, runs_dir)
    except OSError as error:  # their folders are somebody else's
        _say(console, f"no report: {error}")
        return
    if as_json:
        print_json(report, statuses, runs_dir)
        return
    print_report(report, [status for _, status in ended], run_dirs, runs_dir, console)


def _time_of_day(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at).strftime("%H:%M:%S")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _say_nothing_runs(console: Console) -> None:
    _say(console, _nothing_runs())


def _nothing_runs() -> str:
    settings = Settings.from_env()
    if not elsewhere(settings) and is_claimed(settings.home):
        return f"a control plane is starting or ending here (RLIX_HOME is {settings.home}); try again soon"
    return f"no control plane runs here (RLIX_HOME is {settings.home}); `rlix run` starts one"


def _wait(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
