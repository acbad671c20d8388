"""What jobs leave behind: reports in their folders, tables, JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rlix.cli.view import make_console, plain
from rlix.cli.watch import FINAL_STATES
from rlix.monitor.report import Report, build_report, keep_report, summary, write_report
from rlix.monitor.tables import render_text
from rlix.monitor.trace import write_trace
from rlix.node import output
from rlix.node.run_folder import how_to_go_on
from rlix.protocol.types import REPORT_FILE

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus

EXIT_FAILED = 1


def exit_code(statuses: Sequence["JobStatus"], signal_number: int | None) -> int:
    """128 + signal when the user stopped the run, 1 when a job failed or did not end, otherwise 0."""
    if signal_number is not None:
        return 128 + signal_number
    return 0 if all(status.state == "finished" for status in statuses) else EXIT_FAILED


def write_reports(run_dirs: Sequence[Path], runs_dir: Path) -> Report | None:
    """Write trace and report of each run, and in `runs_dir` one report about all.

    Returns None when no job got as far as a run folder.
    """
    written = [run_dir for run_dir in run_dirs if (run_dir / "events.jsonl").exists()]
    if not written:
        return None
    for run_dir in written:
        report = build_report([run_dir])
        write_trace(report.records, run_dir / "trace.json")
        write_report(report, run_dir / "report.html")
    report = build_report(written)
    keep_report(report, runs_dir)
    return report


def print_report(
    report: Report | None, statuses: Sequence["JobStatus"], run_dirs: Sequence[Path], runs_dir: Path, console: Console
) -> None:
    if report is not None:
        console.print(render_text(report.tables))
    for status, run_dir in zip(statuses, run_dirs, strict=True):
        ended = status.state if status.state in FINAL_STATES else f"ended while {status.phase}"
        printed = run_dir / output.FILE
        note = f" (what its code printed: {printed})" if output.has_more(printed) else ""
        said = f"{status.name}: {ended}, {run_dir}{note}{_next(status, run_dir)}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    if report is None:
        return
    link = runs_dir / REPORT_FILE
    said = f"report: {link} (kept as {link.parent / link.readlink()})"
    console.print(said, markup=False, highlight=False, soft_wrap=True)


def _next(status: "JobStatus", run_dir: Path) -> str:
    """Where a run that was stopped goes on; of one with an error, that says so."""
    if status.state == "finished" or status.error:
        return ""
    if status.moved_to is None:
        return f"; {how_to_go_on(run_dir)}"
    before = run_dir.with_name(status.name)
    return f"; it did no step, so the run before it is in {before} again: {how_to_go_on(before)}"


def print_failures(statuses: Sequence["JobStatus"]) -> None:
    """Say on stderr why jobs failed, and whose command stopped them."""
    for status in statuses:
        if status.state == "failed" or status.error:
            make_console(stderr=True).print(
                f"rlix: {status.name} {'failed:' if status.state == 'failed' else 'was'} {plain(status.error or '')}",
                style="red",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def print_json(report: Report | None, statuses: Sequence["JobStatus"], runs_dir: Path) -> None:
    result = {
        "report": None if report is None else str(runs_dir / REPORT_FILE),
        "states": [  # as `jobs` a list: two jobs may have one name
            {"name": s.name, "pipeline_id": s.pipeline_id, "state": s.state, "error": s.error} for s in statuses
        ],
        **({} if report is None else summary(report)),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
