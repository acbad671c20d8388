"""What a part of a flow costs, as measured: seconds and bytes by width and batch, and what lies between the points.

A call on `width` ranks splits its items among them, so what counts is the load: the items of the fullest rank. At one
load the time hardly depends on the width, which makes that the right direction to interpolate in. Over loads a table is
piecewise linear: a straight line through all of them is wrong by more than the differences between plans.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from rlix.protocol.errors import SpecError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: a call of `items` items on `width` ranks.

    `peak_bytes` and `resident_bytes` are of the fullest device: at most during the call, and loaded but idle.
    """

    width: int
    items: int
    seconds: float
    peak_bytes: float = 0.0
    resident_bytes: float = 0.0

    @property
    def load(self) -> int:
        return -(-self.items // self.width)


@dataclass(frozen=True, slots=True)
class HoldOut:
    """How wrong the table is about points it was not told: mean and worst relative error of `points` of them."""

    points: int
    mean: float
    worst: float


class Table:
    """Measurements of one part. Points of one width and load are averaged.

    Raises:
        SpecError: there is no point, or one is not positive.
    """

    def __init__(self, points: Iterable[Point]) -> None:
        self.points = tuple(sorted(points, key=lambda p: (p.width, p.items)))
        if not self.points:
            raise SpecError("a table needs at least one measurement")
        for p in self.points:
            numbers = 0 < p.seconds < inf and 0 <= p.peak_bytes < inf and 0 <= p.resident_bytes < inf  # NaN is none
            if p.width < 1 or p.items < 1 or not numbers:
                raise SpecError(f"not a measurement: {p}")
        rows: dict[int, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
        for p in self.points:
            rows[p.width][p.load].append(p)
        self.widths = tuple(sorted(rows))
        self._rows = [_Row(rows[width]) for width in self.widths]

    def seconds(self, width: int, items: int) -> float:
        """Of one call."""
        return float(self.seconds_by_width([width], items)[0])

    def seconds_by_width(self, widths: Sequence[int] | NDArray[np.int64], items: int) -> Array:
        """Of calls of `items` items on each of these widths (at least 1)."""
        return self._blend(widths, [row.seconds for row in self._rows], items, geometric=True)

    def peak_bytes(self, widths: Sequence[int] | NDArray[np.int64], items: int) -> Array:
        return self._blend(widths, [row.peak for row in self._rows], items, geometric=False)

    def resident_bytes(self, widths: Sequence[int] | NDArray[np.int64]) -> Array:
        return self._blend(widths, [row.resident for row in self._rows], 1, geometric=False)

    def unknown(self, width: int, items: int) -> str:
        """What an answer about this call guesses, "" if it lies between measurements."""
        load = -(-items // width)
        if not self.widths[0] <= width <= self.widths[-1]:
            return f"width {width} is outside the measured {self.widths[0]}–{self.widths[-1]}"
        below = max(i for i, w in enumerate(self.widths) if w <= width)
        around = self._rows[below : below + (1 if width == self.widths[below] else 2)]
        low, high = max(r.loads[0] for r in around), min(r.loads[-1] for r in around)
        if not low <= load <= high:
            return f"{load} items a rank are outside the measured {low:g}–{high:g}"
        return ""

    def hold_out(self) -> HoldOut | None:
        """Leave out each point that has measured neighbours on both sides; None: there is no such point."""
        errors = []
        for row, width in zip(self._rows, self.widths, strict=True):
            for load in row.loads[1:-1]:
                rest = [p for p in self.points if (p.width, p.load) != (width, int(load))]
                left = [p for p in self.points if (p.width, p.load) == (width, int(load))]
                errors += _errors(Table([p for p in rest if p.width == width]), left)
        for width in self.widths[1:-1]:
            left = [p for p in self.points if p.width == width]
            errors += _errors(Table([p for p in self.points if p.width != width]), left)
        return HoldOut(len(errors), fmean(errors), max(errors)) if errors else None

    def _blend(
        self, widths: Sequence[int] | NDArray[np.int64], lines: list["_Line"], items: int, *, geometric: bool
    ) -> Array:
        """Between the measured widths linear in the logarithm of the width; outside as at the nearest."""
        wanted = np.asarray(widths, dtype=np.float64)
        loads = np.ceil(items / wanted)
        rows = np.stack([line.at(loads) for line in lines])
        if len(rows) == 1:
            return rows[0]
        known = np.log(np.asarray(self.widths, dtype=np.float64))
        position = np.interp(np.log(wanted), known, np.arange(len(known)))
        low = np.minimum(position.astype(np.int64), len(known) - 2)
        share = position - low
        column = np.arange(len(wanted))
        if geometric:
            rows = np.log(rows)
        blended = rows[low, column] * (1 - share) + rows[low + 1, column] * share
        return np.exp(blended) if geometric else blended


class _Line:
    """Piecewise linear through points; beyond the last with the last slope, before the first with the first."""

    def __init__(self, x: list[float], y: list[float]) -> None:
        self._x, self._y = np.asarray(x), np.asarray(y)
        self._least = min(y) / 1000 if min(y) > 0 else 0.0

    def at(self, x: Array) -> Array:
        xs, ys = self._x, self._y
        if len(xs) == 1:
            return np.where(x > xs[0], ys[0] * x / xs[0], ys[0])
        y = np.interp(x, xs, ys)
        before = ys[0] + (x - xs[0]) * (ys[1] - ys[0]) / (xs[1] - xs[0])
        after = ys[-1] + (x - xs[-1]) * max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        y = np.where(x < xs[0], before, np.where(x > xs[-1], after, y))
        return np.maximum(y, self._least)


class _Row:
    """The lines of one width, over loads."""

    def __init__(self, by_load: dict[int, list[Point]]) -> None:
        self.loads = [float(load) for load in sorted(by_load)]
        measured = [by_load[load] for load in sorted(by_load)]
        self.seconds = _Line(self.loads, [fmean(p.seconds for p in points) for points in measured])
        self.peak = _Line(self.loads, [max(p.peak_bytes for p in points) for points in measured])
        resident = max(p.resident_bytes for points in measured for p in points)
        self.resident = _Line([1.0, 2.0], [resident, resident])


def _errors(table: Table, left_out: list[Point]) -> list[float]:
    return [abs(table.seconds(p.width, p.items) / p.seconds - 1) for p in left_out]
