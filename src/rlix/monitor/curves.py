"""A run's metrics while it runs: read on where they were left, and thinned to what a curve can show."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlix.monitor.records import SampleText, metrics_row, sample_text

POINTS, METRICS = 600, 32
"""Of one run at most."""
LONGEST_TEXT = 2000
"""Characters of a sample."""
_MOST_READ = 16 << 20  # bytes at one look; the rest at the next
_TAIL = 256 << 10  # bytes in which the latest samples are looked for
_SAMPLES = 8
_FIRST = ("reward", "exact", "loss")


class Curves:
    """Some of the steps, evenly, and the last one."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, dict[str, float]]] = []  # with how many came before
        self._every = 1

    def add(self, row: Mapping[str, float]) -> None:
        """`row`: with its `step`. One that was done before, in a run that went on from a checkpoint, replaces it."""
        while self._rows and self._rows[-1][1]["step"] >= row["step"]:
            self._rows.pop()
        number = self._rows[-1][0] + 1 if self._rows else 0
        if self._rows and self._rows[-1][0] % self._every:
            self._rows.pop()  # it was there as the last one
        self._rows.append((number, dict(row)))
        if len(self._rows) > POINTS:
            self._every *= 2
            self._rows = [each for each in self._rows if each[0] % self._every == 0 or each[0] == number]

    @property
    def last(self) -> Mapping[str, float]:
        return self._rows[-1][1] if self._rows else {}

    def told(self) -> dict[str, Any]:
        """Step, unix time and values of each metric, by name; the report's own first where there are too many."""
        rows = [row for _, row in self._rows]
        keys = {key for row in rows for key in row} - {"step", "time"}
        first = [key for key in keys if key in _FIRST or key.startswith("eval/")]
        chosen = [*sorted(first), *sorted(keys.difference(first))][:METRICS]
        return {
            "step": [int(row["step"]) for row in rows],
            "time": [round(row.get("time", 0.0), 1) for row in rows],
            "metrics": {key: [short(row.get(key)) for row in rows] for key in chosen},
        }


class RunReader:
    """Of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offset = 0
        self._curves = Curves()

    def curves(self) -> dict[str, Any]:
        """With what was written since the last look."""
        path = self._run_dir / "metrics.jsonl"
        if path.is_file():
            if path.stat().st_size < self._offset:  # it was begun anew
                self._offset, self._curves = 0, Curves()
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_READ)
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for row in _rows(whole):
                if isinstance(row.get("step"), int):
                    with suppress(OverflowError):  # a whole number that is too large
                        self._curves.add(metrics_row(row))
        return self._curves.told()

    def samples(self) -> list[SampleText]:
        """The latest that were written, their texts cut."""
        path = self._run_dir / "samples.jsonl"
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            data = file.read(_TAIL)
        found = []
        for row in _rows(data[: data.rfind(b"\n") + 1])[-_SAMPLES:]:
            try:
                found.append(sample_text(row))
            except (KeyError, TypeError, ValueError):  # a job may write there what it likes
                continue
        return found


def short(value: float | None) -> float | None:
    """Six digits are more than a curve can show."""
    return None if value is None else float(f"{value:.6g}")


def cut(text: str, *, head: bool = True) -> str:
    """A sample's text, at most as long as is shown: its begin, or its end."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} …" if head else f"… {text[-LONGEST_TEXT:]}"


def _rows(data: bytes) -> list[dict[str, Any]]:
    """The lines that are JSON objects; the first may be the end of one."""
    found = []
    for line in data.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
