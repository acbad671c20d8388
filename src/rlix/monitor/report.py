"""One self-contained HTML page, text tables and a JSON summary about runs that shared a pool of devices."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlix.monitor.accounting import Accounting, account, adapter_use, contended_window, device_ids, lanes, shared_window
from rlix.monitor.curves import cut, short
from rlix.monitor.records import PoolDevice, RunRecord, SampleText, load_run, runs_of
from rlix.monitor.split import SplitEstimate, split_estimate
from rlix.monitor.tables import (
    TableData,
    adapter_tables,
    count,
    device_table,
    duration,
    job_table,
    percent,
    split_table,
)
from rlix.protocol.types import REPORT_FILE, REPORTS_FOLDER, Phase

SCRIPTS = ("common.js", "timeline.js", "curves.js", "start.js")
PHASE_ORDER = {phase.name.lower(): phase.value for phase in Phase}


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a report says, computed once. `contended` covers the time in which every job was stepping."""

    records: tuple[RunRecord, ...]
    accounting: Accounting
    contended: Accounting
    estimate: SplitEstimate | None
    runs: tuple[RunRecord, ...] = ()  # the adapters of jobs that train many

    @property
    def pool(self) -> tuple[PoolDevice, ...]:
        """The devices of the pool, each once."""
        found = {device.id: device for record in self.records for device in record.devices}
        return tuple(found[device] for device in sorted(found))

    @property
    def is_timed(self) -> bool:
        """Whether phases last as long as on GPUs: on some, or at a declared speed."""
        return all(device.kind != "cpu" for device in self.pool) or all(
            record.spec.get("declared_speed") for record in self.records
        )

    @property
    def tables(self) -> tuple[TableData, ...]:
        tables = [job_table(self.accounting), device_table(self.accounting, self.pool, timed=self.is_timed)]
        if self.runs:
            tables[1:1] = adapter_tables([adapter_use(run) for run in self.runs])
        if self.estimate is not None and self.is_timed:
            tables.append(split_table(self.accounting, self.contended, self.estimate))
        return tuple(tables)


def build_report(directories: Sequence[Path]) -> Report:
    """Read the run folders and account for them. Raises SpecError for a folder that cannot be read."""
    records = tuple(load_run(directory) for directory in directories)
    of = [lanes(record) for record in records]
    accounting = account(records, of=of)
    return Report(
        records=records,
        accounting=accounting,
        contended=account(records, contended_window(records), of, accounting.jobs),
        estimate=split_estimate(records, of),
        runs=tuple(run for record in records for run in runs_of(record)),
    )


def summary(report: Report) -> dict[str, Any]:
    """What `--json` prints: plain numbers, seconds and shares between 0 and 1."""
    accounting, total = report.accounting, report.accounting.total
    return {
        "window_s": accounting.window_s,
        "steps_per_hour": accounting.steps_per_hour,
        "busy_share": accounting.share(total.busy_s),
        "switching_share": accounting.share(total.switching_s),
        "idle_share": accounting.share(total.idle_s),
        "contended": {
            "window_s": report.contended.window_s,
            "idle_share": report.contended.share(report.contended.total.idle_s),
        },
        "jobs": [
            asdict(job) | {"run_dir": str(record.directory)}
            for job, record in zip(accounting.jobs, report.records, strict=True)
        ],
        "adapters": [asdict(adapter_use(run)) for run in report.runs],
        "devices": [asdict(use) | {"idle_s": use.idle_s} for use in accounting.devices],
        "split_estimate": asdict(report.estimate) if report.estimate and report.is_timed else None,
    }


def render_html(report: Report) -> str:
    """The page. It loads nothing from anywhere: styles, script and data are inside."""
    assets = files("rlix.monitor") / "assets"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((assets / "report.html.j2").read_text())
    total, window = report.accounting.total, shared_window(report.records)
    return template.render(
        names=[record.name for record in report.records],
        date=datetime.fromtimestamp(window[0][0], UTC).strftime("%-d %B %Y, %H:%M UTC") if window else "",
        subtitle=_subtitle(report),
        tiles=_tiles(report),
        tables=report.tables,
        curves=_curves(report),
        samples=[
            (record.name, _chosen(record.samples)) for record in (*report.records, *report.runs) if record.samples
        ],
        uses=[*report.accounting.devices, total],
        style=Markup((assets / "report.css").read_text()),
        script=Markup("\n".join((assets / name).read_text() for name in SCRIPTS)),
        data=Markup(embed(page_data(report))),
    )


def write_report(report: Report, path: Path) -> Path:
    """Write the page to `path` and return it. What a link there leads to stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, lambda partial: partial.write_text(render_html(report)))
    return path


def keep_report(report: Report, runs_dir: Path) -> Path:
    """Write the page of one launch to `runs_dir`/reports, under its time and its first job, with the link
    `runs_dir`/report.html to the newest of them; returns the link."""
    sessions = [record.sessions for record in report.records]
    started = min((found[-1][0] for found in sessions if found), default=time.time())
    stamp = datetime.fromtimestamp(started, UTC).strftime("%Y%m%d-%H%M%S")
    kept = write_report(report, runs_dir / REPORTS_FOLDER / f"{stamp}-{report.records[0].directory.name}.html")
    link = runs_dir / REPORT_FILE
    _replace(link, lambda partial: partial.symlink_to(kept.relative_to(runs_dir)))
    return link


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file under another name, and give it its own when it is there."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        write(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def page_data(report: Report) -> dict[str, Any]:
    """What the page's script draws. Times are seconds since the first job started."""
    window = shared_window(report.records)
    origin = window[0][0] if window else 0.0
    end = window[-1][1] - origin if window else 0.0
    found = {span.phase for record in report.records for span in record.spans}
    phases = sorted(found, key=lambda phase: (PHASE_ORDER.get(phase, len(PHASE_ORDER)), phase))
    kinds = {device.id: device.kind for device in report.pool}
    spans = [
        [
            span.device,
            job,
            phases.index(span.phase),
            span.kind,
            round(span.start - origin, 3),
            round(span.end - origin, 3),
            span.step,
        ]
        for job, record in enumerate(report.records)
        for span in record.spans
    ]
    return {
        "end": end,
        "devices": [{"id": device, "kind": kinds.get(device, "")} for device in device_ids(report.records)],
        "phases": phases,
        "spans": sorted(spans, key=lambda row: (row[0], row[4])),
        "jobs": [_job_data(record, origin) for record in report.records],
        "runs": [_job_data(record, origin) for record in report.runs],
    }


def _curves(report: Report) -> list[str]:
    """The metrics whose curves a page opens with."""
    found = {key for record in report.records for row in record.metrics for key in row}
    return ["reward", "exact", *(key for key in ("eval/reward", "eval/exact") if key in found)]


def _chosen(samples: Sequence[SampleText]) -> list[SampleText]:
    """Those of the first and of the last step that has some, of training and of evaluation; long texts cut."""
    chosen = []
    for evaluation in (False, True):
        of_kind = [sample for sample in samples if sample.evaluation is evaluation]
        steps = {sample.step for sample in of_kind}
        ends = {min(steps), max(steps)} if steps else set()
        chosen += [sample for sample in of_kind if sample.step in ends]
    return [replace(s, prompt=cut(s.prompt, head=False), completion=cut(s.completion)) for s in chosen]


def _job_data(record: RunRecord, origin: float) -> dict[str, Any]:
    keys = sorted({key for row in record.metrics for key in row} - {"step", "time"})
    return {
        "name": record.name,
        "step": [int(row["step"]) for row in record.metrics],
        "time": [round(row.get("time", origin) - origin, 3) for row in record.metrics],
        "metrics": {key: [short(row.get(key)) for row in record.metrics] for key in keys},
        "events": [{"name": event.event, "time": round(event.time - origin, 3)} for event in record.job_events],
    }


def embed(data: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in, whatever a job is called."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _subtitle(report: Report) -> str:
    jobs, devices = len(report.records), len(report.accounting.devices)
    kinds = {device.kind for device in report.pool}
    kind = {frozenset({"cpu"}): "virtual GPU", frozenset({"cuda"}): "GPU"}.get(frozenset(kinds), "device")
    plural = "" if devices == 1 else "s"
    return (
        f"{jobs} job{'' if jobs == 1 else 's'} on {devices} {kind}{plural} for {duration(report.accounting.window_s)}"
    )


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the numbers at the top."""
    accounting, total = report.accounting, report.accounting.total
    tiles = [
        ("Devices busy", percent(accounting.share(total.busy_s)), "of the time in which any job ran"),
        ("Devices idle", percent(accounting.share(total.idle_s)), "start-up included"),
        ("Switching", percent(accounting.share(total.switching_s)), "loading, offloading, weight updates"),
        ("Steps per hour", count(accounting.steps_per_hour), "all jobs together"),
    ]
    if report.contended.window_s > 0:
        idle = report.contended.share(report.contended.total.idle_s)
        tiles.insert(2, ("Idle under load", percent(idle), "while every job was stepping"))
    if report.estimate is not None and report.is_timed:
        parts = " + ".join(str(job.devices) for job in report.estimate.jobs)
        tiles.append((f"Idle if split {parts}", percent(report.estimate.idle_share), "estimate, see below"))
    return tiles
