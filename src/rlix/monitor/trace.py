"""A run as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per device; in it one track per job and phase. Further processes hold, per job, reward and exact match as
counters and the job's own events.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlix.monitor.accounting import device_ids, shared_window
from rlix.monitor.records import RunRecord

TraceEvent = dict[str, Any]

JOB_PROCESS_OFFSET = 100_000
"""Process ids of jobs start here, those of devices are the devices' own."""

COUNTERS = ("reward", "exact", "tokens_per_s")


def trace_events(records: Sequence[RunRecord]) -> list[TraceEvent]:
    """The events of all runs on one time axis, in microseconds since the first job started."""
    window = shared_window(records)
    origin = window[0][0] if window else 0.0
    labels = {device.id: f"{device.kind}, {device.node_ip}" for record in records for device in record.devices}
    events: list[TraceEvent] = []
    for device in device_ids(records):
        label = f"device {device} ({labels[device]})" if device in labels else f"device {device}"
        events.append(_name("process_name", label, pid=device))
    tracks: dict[tuple[int, str, str], int] = {}
    for index, record in enumerate(records):
        events += _device_events(record, origin, tracks)
        events += _job_events(record, origin, pid=JOB_PROCESS_OFFSET + index)
    return events


def write_trace(records: Sequence[RunRecord], path: Path) -> Path:
    """Write `trace_events` as a JSON trace file and return its path."""
    path.write_text(json.dumps({"traceEvents": trace_events(records), "displayTimeUnit": "ms"}, separators=(",", ":")))
    return path


def _device_events(record: RunRecord, origin: float, tracks: dict[tuple[int, str, str], int]) -> list[TraceEvent]:
    events: list[TraceEvent] = []
    for span in record.spans:
        key = (span.device, record.name, span.phase)
        if key not in tracks:
            tracks[key] = len(tracks) + 1
            events.append(_name("thread_name", f"{record.name}: {span.phase}", pid=span.device, tid=tracks[key]))
        events.append(
            {
                "name": span.phase if span.kind == "busy" else span.kind,
                "cat": span.kind,
                "ph": "X",
                "ts": _microseconds(span.start - origin),
                "dur": _microseconds(span.end - span.start),
                "pid": span.device,
                "tid": tracks[key],
                "args": {"job": record.name, "cluster": span.cluster, "step": span.step},
            }
        )
    return events


def _job_events(record: RunRecord, origin: float, pid: int) -> list[TraceEvent]:
    events = [_name("process_name", f"job {record.name}", pid=pid)]
    for row in record.metrics:
        for key in COUNTERS:
            if key in row and "time" in row:
                ts = _microseconds(row["time"] - origin)
                events.append({"name": key, "ph": "C", "ts": ts, "pid": pid, "args": {key: row[key]}})
    instants = [(event.event, event.time, {"detail": event.detail}) for event in record.job_events]
    instants += [(f"checkpoint {c.step}", c.time, {"detail": c.path}) for c in record.checkpoints]
    for name, time, args in instants:
        ts = _microseconds(time - origin)
        events.append({"name": name, "ph": "i", "s": "p", "ts": ts, "pid": pid, "tid": 0, "args": args})
    return events


def _name(kind: str, name: str, *, pid: int, tid: int = 0) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
