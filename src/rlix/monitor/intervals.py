"""Sets of half-open time intervals `[start, end)`, in seconds, kept sorted and disjoint."""

from collections.abc import Iterable
from math import fsum

Interval = tuple[float, float]
Intervals = tuple[Interval, ...]
"""Sorted, disjoint, each of positive length. `union` makes one out of anything."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """The points in any of `intervals`, which may overlap, touch, be empty and come in any order."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """The points in both."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """The points in `left` that are not in `right`."""
    if not left:
        return ()
    gaps: list[Interval] = []
    cursor = left[0][0]
    for start, end in right:
        gaps.append((cursor, start))
        cursor = max(cursor, end)
    gaps.append((cursor, max(cursor, left[-1][1])))
    return intersect(left, union(gaps))


def length(intervals: Intervals) -> float:
    """Seconds covered."""
    return fsum(end - start for start, end in intervals)
