"""The folder `runs/<name>/` where one job's spec, metrics, events and checkpoints live."""

import json
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_CHECKPOINT = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Span:
    """What one device did for a job, in Unix seconds. `kind`: busy, load, offload or sync."""

    devices: tuple[int, ...]
    cluster: str
    phase: str
    kind: str
    start: float
    end: float
    step: int


class RunFolder:
    """Appends to a run's JSONL files (one flushed line per record, safe from several threads)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    @staticmethod
    def fresh(path: Path) -> "RunFolder":
        """Create the folder; an earlier run of the same name is moved aside, never overwritten."""
        if path.exists() and any(path.iterdir()):
            stamp = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y%m%d-%H%M%S")
            aside = path.with_name(f"{path.name}-{stamp}")
            count = 1
            while aside.exists():
                count += 1
                aside = path.with_name(f"{path.name}-{stamp}-{count}")
            path.rename(aside)
        path.mkdir(parents=True, exist_ok=True)
        return RunFolder(path)

    @staticmethod
    def resumed(path: Path, step: int) -> "RunFolder":
        """Reopen a folder at a checkpoint: metrics of steps that will be done again are dropped."""
        metrics = path / "metrics.jsonl"
        if metrics.exists():
            rows = [line for line in metrics.read_text().splitlines() if _step_of(line) < step]
            metrics.write_text("".join(f"{row}\n" for row in rows))
        return RunFolder(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The newest complete checkpoint as (number of finished steps, path), or None."""
        found = list_checkpoints(self.checkpoints)
        return found[-1] if found else None

    def prune_checkpoints(self, keep: int) -> None:
        for _, path in list_checkpoints(self.checkpoints)[:-keep]:
            shutil.rmtree(path)

    def write_spec(self, text: str) -> None:
        (self.path / "spec.yaml").write_text(text)

    def metrics(self, row: dict[str, Any]) -> None:
        self._append("metrics.jsonl", [row])

    def event(self, row: dict[str, Any]) -> None:
        self._append("events.jsonl", [row])

    def spans(self, spans: Sequence[Span]) -> None:
        rows = []
        for span in spans:
            row = {"type": "span", **asdict(span)}
            del row["devices"]
            rows += [{**row, "device": device} for device in span.devices]
        self._append("events.jsonl", rows)

    def _append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with self._lock, (self.path / name).open("a") as file:
            file.write(text)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints in ascending order; a partly written one still has its temporary name."""
    if not folder.is_dir():
        return []
    matches = [(match, path) for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in matches)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):  # a line torn by a crash
        return 1 << 62
