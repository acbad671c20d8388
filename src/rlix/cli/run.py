"""`rlix run`: from job files to run folders and a report."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from rich.console import Console
from rich.live import Live

from rlix.cli.view import make_console, plain
from rlix.cli.watch import FINAL_STATES, Interrupts, KilledError, LiveScreen, LogScreen, Screen, watch
from rlix.control.init import init, new_pool_size, shutdown
from rlix.control.settings import Settings
from rlix.monitor.report import Report, build_report, summary, write_report
from rlix.monitor.tables import render_text
from rlix.monitor.trace import write_trace
from rlix.pipeline.launch import JobHandle, launch, split_devices
from rlix.pipeline.spec import JobSpec, check_jobs, load_job
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.messages import ControlStatus, DeviceKind

if TYPE_CHECKING:
    from rlix.pipeline.base import JobStatus

STATUS_TIMEOUT_S = 5.0
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user asked for; see `rlix run --help`."""

    specs: tuple[str, ...]
    runs_dir: Path
    devices: int | None = None
    resume: bool = False
    split: bool = False
    as_json: bool = False
    live: bool = True


def run_jobs(options: RunOptions) -> int:
    """Run the jobs to their end and report; returns the exit code.

    Raises SpecError for a user's mistake (nothing has been started then) and RlixError when the control plane fails.
    """
    specs = [load_job(spec) for spec in options.specs]
    _check_output(options.runs_dir)
    if options.devices is not None:
        check_jobs(specs, range(options.devices))
    console = make_console(stderr=options.as_json)
    interrupts = Interrupts()
    # With --json nothing else may reach stdout, and Ray prints what workers print.
    quiet = contextlib.redirect_stdout(sys.stderr) if options.as_json else contextlib.nullcontext()
    try:
        with quiet, interrupts.handled():
            statuses, run_dirs = _run_to_end(specs, options, console, interrupts)
            report = _report(run_dirs, options.runs_dir)
            if not options.as_json:
                _print_report(report, statuses, run_dirs, options.runs_dir, console)
    except (KilledError, SystemError):  # while starting or while reporting: there is nothing more to say
        if not interrupts.killed:
            raise
        return exit_code((), interrupts.signal_number)
    for status in statuses:
        if status.state == "failed":
            make_console(stderr=True).print(
                f"rlix: {status.name} failed: {plain(status.error or '')}",
                style="red",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    if options.as_json:
        _print_json(report, statuses, options.runs_dir)
    return exit_code(statuses, interrupts.signal_number)


def exit_code(statuses: Sequence["JobStatus"], signal_number: int | None) -> int:
    """128 + signal when the user stopped the run, 1 when a job failed or did not end, otherwise 0."""
    if signal_number is not None:
        return 128 + signal_number
    return 0 if all(status.state == "finished" for status in statuses) else EXIT_FAILED


def _check_output(runs_dir: Path) -> None:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"--runs-dir {runs_dir}: cannot be created ({error.strerror}); choose another folder"
        ) from error
    if not os.access(runs_dir, os.W_OK):
        raise SpecError(f"--runs-dir {runs_dir}: not writable; choose another folder")


def _run_to_end(
    specs: list[JobSpec], options: RunOptions, console: Console, interrupts: Interrupts
) -> tuple[tuple["JobStatus", ...], list[Path]]:
    handles: list[JobHandle] = []
    console.print("starting the control plane ...", highlight=False)
    with _control_plane(specs, options) as orchestrator:
        try:
            status = _ControlStatus(orchestrator)
            pool = status().devices
            if all(device.kind is DeviceKind.CPU for device in pool):
                console.print(f"{len(pool)} virtual GPUs (another number: --devices N)", highlight=False)
            ids = [device.id for device in pool]
            check_jobs(specs, ids)
            placed = split_devices(specs, ids) if options.split else specs
            handles = launch(placed, options.runs_dir, resume=options.resume)
            # Ray has put its own handler for SIGTERM in place of ours meanwhile.
            with interrupts.handled(), _screen(console, options) as screen:
                statuses = watch(handles, status, screen, interrupts, time.monotonic)
        except (KilledError, SystemError):  # the latter is what Ray's extension makes of the former
            if not interrupts.killed:
                raise
            statuses = tuple(handle.status() for handle in handles)
        finally:
            for handle in handles:
                handle.close()
    return statuses, [handle.run_dir for handle in handles]


@contextlib.contextmanager
def _control_plane(specs: Sequence[JobSpec], options: RunOptions) -> Iterator[Any]:
    """The orchestrator: of a control plane that runs already, or of one that lives as long as this block."""
    ours = False
    try:
        try:
            orchestrator = init(create_if_missing=False, log_level="WARNING")
        except RlixError:
            ours = True
            settings = Settings.from_env()
            if not ray.is_initialized():  # nor will it be before we know that the jobs fit the pool it would have
                check_jobs(specs, range(new_pool_size(settings, options.devices)))
            orchestrator = init(virtual_gpus=options.devices, settings=settings, log_level="WARNING")
        if not ours and options.devices is not None:
            raise SpecError("--devices: a control plane runs already, with its own devices; leave the option out")
        yield orchestrator
    finally:
        if ours:
            shutdown()
        else:
            ray.shutdown()


class _ControlStatus:
    """Asks the orchestrator; a late answer shows the last known status, a dead control plane is an error."""

    def __init__(self, orchestrator: Any) -> None:
        self._orchestrator = orchestrator
        self._last: ControlStatus | None = None

    def __call__(self) -> ControlStatus:
        try:
            self._last = ray.get(self._orchestrator.status.remote(), timeout=STATUS_TIMEOUT_S)
        except GetTimeoutError:
            if self._last is None:
                raise RlixError(f"the control plane did not answer within {STATUS_TIMEOUT_S:.0f} s") from None
        except RayActorError as error:
            raise RlixError(f"the control plane died: {error}") from error
        assert self._last is not None
        return self._last


@contextlib.contextmanager
def _screen(console: Console, options: RunOptions) -> Iterator[Screen]:
    if options.live and not options.as_json and console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            yield LiveScreen(live)
    else:
        yield LogScreen(console)


def _report(run_dirs: Sequence[Path], runs_dir: Path) -> Report | None:
    """Write trace and report of each run, and one report about all; None when no job got as far as a run folder."""
    written = [run_dir for run_dir in run_dirs if (run_dir / "events.jsonl").exists()]
    if not written:
        return None
    for run_dir in written:
        report = build_report([run_dir])
        write_trace(report.records, run_dir / "trace.json")
        write_report(report, run_dir / "report.html")
    report = build_report(written)
    write_report(report, runs_dir / "report.html")
    return report


def _print_report(
    report: Report | None, statuses: Sequence["JobStatus"], run_dirs: Sequence[Path], runs_dir: Path, console: Console
) -> None:
    if report is None:
        return
    console.print(render_text(report.tables))
    for status, run_dir in zip(statuses, run_dirs, strict=True):
        ended = status.state if status.state in FINAL_STATES else f"ended while {status.phase}"
        console.print(f"{status.name}: {ended}, {run_dir}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {runs_dir / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def _print_json(report: Report | None, statuses: Sequence["JobStatus"], runs_dir: Path) -> None:
    result = {
        "report": None if report is None else str(runs_dir / "report.html"),
        "states": {status.name: {"state": status.state, "error": status.error} for status in statuses},
        **({} if report is None else summary(report)),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
