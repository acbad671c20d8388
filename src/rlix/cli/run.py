"""`rlix run`: from job files to run folders and a report."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlix.cli.check import check_rows
from rlix.cli.outcome import exit_code, print_failures, print_json, print_report, write_reports
from rlix.cli.plans import check_tables, planned
from rlix.cli.pool import ControlPlaneDiedError, Pool, StatusSource, private_pool, shared_pool
from rlix.cli.resume import say_moves, say_resumptions, take_back_folders
from rlix.cli.script import check_output
from rlix.cli.text import still
from rlix.cli.view import make_console
from rlix.cli.watch import FINAL_STATES, Interrupts, KilledError, screen_on, watch
from rlix.control.init import new_pool_size
from rlix.control.settings import Settings
from rlix.monitor.report import Report
from rlix.node.devices import smallest_memory
from rlix.node.run_folder import check_free
from rlix.pipeline.jobs.handle import JobHandle, find_jobs
from rlix.pipeline.jobs.launch import check_in_service, launch, split_devices
from rlix.pipeline.spec.job import JobSpec, check_jobs
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import DeviceKind

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus

_QUICKLY_READ = 64 * 2**20  # bytes of a file; larger ones are read at the start of the job only


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user asked for; see `rlix run --help`."""

    jobs: tuple[JobSpec, ...]
    runs_dir: Path
    devices: int | None = None
    resume: bool = False
    split: bool = False
    as_json: bool = False
    live: bool = True
    private: bool = False
    memory_check: bool = True


def run_jobs(options: RunOptions) -> int:
    """Run the jobs to their end and report; returns the exit code.

    Raises SpecError for a user's mistake (nothing has been started then) and RlixError when the control plane fails.
    """
    specs = list(options.jobs)
    if Settings.from_env().ray_address == "local":
        options = replace(options, private=True)
    check_output(options.runs_dir)
    check_jobs(specs, None if options.devices is None else range(options.devices))
    check_tables(specs)
    check_rows(specs, _QUICKLY_READ)
    console = make_console(stderr=options.as_json)
    take_back_folders(specs, options.runs_dir, console)
    if options.resume:
        specs = say_resumptions(specs, options.runs_dir, console)
        if not specs:
            if options.as_json:
                print_json(None, (), options.runs_dir)
            return 0
    interrupts = Interrupts()
    # With --json nothing else may reach stdout, and Ray prints what workers print.
    quiet = contextlib.redirect_stdout(sys.stderr) if options.as_json else contextlib.nullcontext()
    try:
        with quiet, interrupts.handled():
            statuses, run_dirs = _run_to_end(specs, options, console, interrupts)
            report = _reported(run_dirs, options.runs_dir, console)
            if not options.as_json:
                print_report(report, statuses, run_dirs, options.runs_dir, console)
    except (KilledError, SystemError):  # while starting or while reporting: there is nothing more to say
        if not interrupts.killed:
            raise
        return exit_code((), interrupts.signal_number)
    print_failures(statuses)
    if options.as_json:
        print_json(report, statuses, options.runs_dir)
    return exit_code(statuses, interrupts.signal_number)


def _reported(run_dirs: Sequence[Path], runs_dir: Path, console: Console) -> Report | None:
    """The report, unless it cannot be written: on a full disk there is more to say than that."""
    try:
        return write_reports(run_dirs, runs_dir)
    except OSError as error:
        console.print(f"no report: {error}", markup=False, highlight=False, soft_wrap=True)
        return None


def _run_to_end(
    specs: list[JobSpec], options: RunOptions, console: Console, interrupts: Interrupts
) -> tuple[tuple["JobStatus", ...], list[Path]]:
    handles: list[JobHandle] = []
    first = "starting the control plane ..." if options.private else "joining the control plane, or starting one ..."
    console.print(first, highlight=False)
    with _control_plane(specs, options, interrupts, console) as pool:
        if not options.private:
            console.print(pool.said, highlight=False, markup=False, soft_wrap=True)
        try:
            status = StatusSource(pool)
            check_in_service(now := status())
            devices = now.devices
            if options.private and all(device.kind is DeviceKind.CPU for device in devices):
                console.print(f"{len(devices)} virtual GPUs (another number: --gpus N)", highlight=False)
            ids = [device.id for device in devices]
            resumed = options.runs_dir if options.resume else None
            jobs = planned(specs, ids, smallest_memory(devices), console, resumed)
            specs = [job.spec for job in jobs]
            check_jobs(specs, ids)
            if options.memory_check and (memory := smallest_memory(devices)) is not None:
                from rlix.pipeline.memory.job import (
                    check_memory,
                )  # imports torch, which virtual devices need not wait for

                check_memory(specs, memory)
            placed = split_devices(specs, ids) if options.split else specs
            _check_not_running(placed, options.runs_dir, pool.orchestrator)
            if interrupts.stop_wanted:
                interrupts.kill()
            if not options.resume:
                for spec in placed:
                    check_free(options.runs_dir / spec.name)
                say_moves(placed, options.runs_dir, console)
            handles = launch(placed if options.split else jobs, options.runs_dir, resume=options.resume)
            with screen_on(console, live=options.live and not options.as_json) as screen:
                statuses = watch(handles, status, screen, interrupts, time.monotonic)
        except (KilledError, SystemError):  # the latter is what Ray's extension makes of the former
            if not interrupts.killed or not handles:
                raise
            statuses = tuple(handle.status() for handle in handles)
        except ControlPlaneDiedError:
            handles = []  # there is nobody who could end them
            raise
        finally:
            for handle in handles:
                handle.close()
    return statuses, [Path(status.moved_to or options.runs_dir / status.name) for status in statuses]


def _check_not_running(specs: Sequence[JobSpec], runs_dir: Path, orchestrator: Any) -> None:
    folders = {runs_dir.absolute() / spec.name for spec in specs}
    for job in find_jobs(orchestrator):
        if job.run_dir in folders and job.status().state not in FINAL_STATES:
            raise SpecError(
                f"{job.name}: runs already, as {job.pipeline_id}, in {job.run_dir}; see it with `rlix watch "
                f"{job.pipeline_id}`, or choose another --runs-dir or name"
            )


@contextlib.contextmanager
def _control_plane(
    specs: Sequence[JobSpec], options: RunOptions, interrupts: Interrupts, console: Console
) -> Iterator[Pool]:
    """The control plane that the options ask for."""
    settings = Settings.from_env()
    with contextlib.ExitStack() as attached:
        if options.private:
            # Before anything is started: do the jobs fit the pool there would be?
            check_jobs(specs, range(new_pool_size(settings, options.devices)))
            with still(console, "the control plane is still starting"):
                pool = attached.enter_context(private_pool(settings, options.devices or settings.virtual_gpus))
        else:
            with interrupts.at_once(), still(console, "the control plane is not ready yet"):
                pool = attached.enter_context(shared_pool(settings, options.devices, settings.virtual_gpus))
        yield pool
