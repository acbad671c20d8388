"""Intervals against the plainest model there is: sets of unit cells on a small grid."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rlix.monitor.intervals import Interval, Intervals, intersect, length, subtract, union

GRID = 24

raw_intervals = st.lists(st.tuples(st.integers(0, GRID), st.integers(0, GRID)), max_size=10)


def cells(intervals: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in intervals for cell in range(start, end)}


def from_cells(wanted: set[int]) -> Intervals:
    return union((cell, cell + 1) for cell in wanted)


def merged(raw: list[tuple[int, int]]) -> Intervals:
    return union((float(start), float(end)) for start, end in raw)


@given(raw_intervals)
def test_union(raw: list[tuple[int, int]]) -> None:
    result = merged(raw)
    assert result == from_cells(cells(raw))
    assert all(a[1] < b[0] for a, b in pairwise(result))
    assert length(result) == len(cells(raw))


@given(raw_intervals, raw_intervals)
def test_intersect_and_subtract(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    assert intersect(merged(left), merged(right)) == from_cells(cells(left) & cells(right))
    assert subtract(merged(left), merged(right)) == from_cells(cells(left) - cells(right))


def test_by_hand() -> None:
    work: list[Interval] = [(5.0, 6.0), (0.0, 1.5), (1.0, 2.0), (2.0, 2.5), (4.0, 4.0)]
    assert union(work) == ((0.0, 2.5), (5.0, 6.0))
    assert subtract(((0.0, 10.0),), union(work)) == ((2.5, 5.0), (6.0, 10.0))
    assert subtract(((1.0, 2.0),), ((0.0, 9.0),)) == ()
    assert subtract((), ((0.0, 1.0),)) == ()
    assert intersect(((0.0, 10.0),), ((3.0, float("inf")),)) == ((3.0, 10.0),)
