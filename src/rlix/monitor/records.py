"""What a run folder holds, read back: `metrics.jsonl`, `events.jsonl`, `samples.jsonl` and `spec.yaml`."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rlix.monitor.intervals import Intervals, union
from rlix.protocol.errors import SpecError

T = TypeVar("T")
logger = logging.getLogger(__name__)

SWITCHING_KINDS = frozenset({"load", "offload", "sync"})
ENDINGS = frozenset({"finished", "failed", "stopped"})


@dataclass(frozen=True, slots=True)
class Span:
    """A device did one thing for one cluster of the job. Times are unix seconds."""

    device: int
    cluster: str
    phase: str
    kind: str  # "busy" | "load" | "offload" | "sync"
    start: float
    end: float
    step: int


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    event: str  # "granted" | "shrinking" | "released"
    epoch: int
    cluster: str
    phase: str
    devices: tuple[int, ...]
    time: float
    reason: str | None = None
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobEvent:
    event: str  # "started" | "first_step" | "finished" | "failed" | "stopped"
    time: float
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class PoolDevice:
    id: int
    node_ip: str
    kind: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: str
    time: float


@dataclass(frozen=True, slots=True)
class SampleText:
    """What the policy read and said in one sample. `evaluation`: of held-out prompts."""

    step: int
    evaluation: bool
    prompt: str
    completion: str
    reward: float
    end: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One job's run. `metrics` has one mapping per step, in order; a value that is null or not finite is left out."""

    name: str
    directory: Path
    spec: dict[str, Any]
    metrics: tuple[dict[str, float], ...]
    spans: tuple[Span, ...]
    leases: tuple[LeaseEvent, ...]
    job_events: tuple[JobEvent, ...]
    devices: tuple[PoolDevice, ...]
    checkpoints: tuple[Checkpoint, ...]
    samples: tuple[SampleText, ...] = ()

    @property
    def last_time(self) -> float:
        """The latest time written anywhere in the run (0 for an empty one)."""
        times = [event.time for event in self.job_events]
        times += [span.end for span in self.spans]
        times += [lease.time for lease in self.leases]
        times += [row["time"] for row in self.metrics if "time" in row]
        return max(times, default=0.0)

    @property
    def sessions(self) -> Intervals:
        """When the job ran: from each start to its end, to the next start, or to the last thing written."""
        bounds: list[tuple[float, float]] = []
        started: float | None = None
        for event in sorted(self.job_events, key=lambda e: e.time):
            if event.event == "started":
                if started is not None:  # the session before was killed: it ends with what it wrote last
                    bounds.append((started, self._last_time_before(event.time)))
                started = event.time
            elif event.event in ENDINGS and started is not None:
                bounds.append((started, event.time))
                started = None
        if started is not None:
            bounds.append((started, self.last_time))
        if not self.job_events and self.spans:
            bounds.append((min(span.start for span in self.spans), self.last_time))
        return union(bounds)

    def _last_time_before(self, limit: float) -> float:
        times = [span.end for span in self.spans] + [row["time"] for row in self.metrics if "time" in row]
        return max((time for time in times if time <= limit), default=limit)

    @property
    def state(self) -> str:
        """ "finished", "failed", "stopped", or "unfinished" when nothing says how it ended."""
        latest = max(self.job_events, key=lambda e: e.time, default=None)
        return latest.event if latest is not None and latest.event in ENDINGS else "unfinished"

    @property
    def startup_s(self) -> float:
        """Seconds from the first start to the first training step (0 when there was none)."""
        started = [event.time for event in self.job_events if event.event == "started"]
        first = [event.time for event in self.job_events if event.event == "first_step"]
        return max(0.0, min(first) - min(started)) if started and first else 0.0


def load_run(directory: Path) -> RunRecord:
    """Read a run folder. A line cut off at the end of a file (the run was killed) is dropped with a warning.

    Raises SpecError when the folder is no run folder or a line in it cannot be understood.
    """
    if not directory.is_dir():
        raise SpecError(f"{directory}: no such folder; give a run folder, such as runs/<name>")
    if not (directory / "metrics.jsonl").exists() and not (directory / "events.jsonl").exists():
        raise SpecError(f"{directory}: not a run folder, it has neither metrics.jsonl nor events.jsonl")
    spec = _read_spec(directory / "spec.yaml")
    by_type: dict[str, list[Any]] = {"span": [], "lease": [], "job": [], "pool": [], "checkpoint": []}
    for where, row in _read_lines(directory / "events.jsonl"):
        kind = row.get("type")
        if kind in _PARSERS:
            by_type[kind].append(_parse(where, row, _PARSERS[kind]))
    rows = [_parse(where, row, metrics_row) for where, row in _read_lines(directory / "metrics.jsonl")]
    metrics = {row["step"]: row for row in rows}  # a step done again after a resume replaces its first try
    return RunRecord(
        name=str(spec.get("name") or directory.resolve().name),
        directory=directory,
        spec=spec,
        metrics=tuple(metrics[step] for step in sorted(metrics)),
        spans=tuple(by_type["span"]),
        leases=tuple(by_type["lease"]),
        job_events=tuple(by_type["job"]),
        devices=by_type["pool"][-1] if by_type["pool"] else (),
        checkpoints=tuple(by_type["checkpoint"]),
        samples=tuple(_parse(where, row, sample_text) for where, row in _read_lines(directory / "samples.jsonl")),
    )


def _read_spec(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        spec = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from error
    return spec if isinstance(spec, dict) else {}


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file:line", object) for each line; a run that is still going or was killed may end in half a line."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                logger.warning("%s: the last line is cut off; ignored", where)
                return
            raise SpecError(f"{where}: not valid JSON ({error}); delete the line to read the rest") from error
        if not isinstance(row, dict):
            raise SpecError(f"{where}: expected a JSON object, found {type(row).__name__}")
        yield where, row


def _parse(where: str, row: dict[str, Any], parser: Callable[[dict[str, Any]], T]) -> T:
    try:
        return parser(row)
    except KeyError as error:
        raise SpecError(f"{where}: the key {error} is missing") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"{where}: {error}") from error


def runs_of(record: RunRecord) -> tuple[RunRecord, ...]:
    """The runs of a job that trains many adapters, each by the job's name and its own, also those without a step."""
    folders = sorted(path.parent for path in record.directory.glob("runs/*/events.jsonl"))
    return tuple(replace(load_run(folder), name=f"{record.name}/{folder.name}") for folder in folders)


def metrics_row(row: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of `metrics.jsonl`. Raises KeyError: it says no step."""
    if "step" not in row:
        raise KeyError("step")
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float) and isfinite(value)}


def _span(row: dict[str, Any]) -> Span:
    return Span(
        device=int(row["device"]),
        cluster=str(row["cluster"]),
        phase=str(row["phase"]),
        kind=str(row["kind"]),
        start=float(row["start"]),
        end=float(row["end"]),
        step=int(row.get("step") or 0),
    )


def _lease(row: dict[str, Any]) -> LeaseEvent:
    return LeaseEvent(
        event=str(row["event"]),
        epoch=int(row["epoch"]),
        cluster=str(row["cluster"]),
        phase=str(row["phase"]),
        devices=tuple(int(device) for device in row["devices"]),
        time=float(row["time"]),
        reason=row.get("reason"),
        waited_s=None if row.get("waited_s") is None else float(row["waited_s"]),
    )


def _job(row: dict[str, Any]) -> JobEvent:
    return JobEvent(event=str(row["event"]), time=float(row["time"]), detail=row.get("detail"))


def _pool(row: dict[str, Any]) -> tuple[PoolDevice, ...]:
    return tuple(
        PoolDevice(id=int(d["id"]), node_ip=str(d.get("node_ip", "")), kind=str(d.get("kind", "")))
        for d in row["devices"]
    )


def _checkpoint(row: dict[str, Any]) -> Checkpoint:
    return Checkpoint(step=int(row["step"]), path=str(row["path"]), time=float(row["time"]))


def sample_text(row: dict[str, Any]) -> SampleText:
    """A line of `samples.jsonl`. Raises KeyError, TypeError or ValueError: it is none."""
    return SampleText(
        step=int(row["step"]),
        evaluation=bool(row.get("evaluation")),
        prompt=str(row["prompt"]),
        completion=str(row["completion"]),
        reward=float(row["reward"]),
        end=str(row.get("end", "")),
        error=str(row.get("error", "")),
    )


_PARSERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "span": _span,
    "lease": _lease,
    "job": _job,
    "pool": _pool,
    "checkpoint": _checkpoint,
}
