"""Sets of half-open time intervals `[start, end)`, in seconds, kept sorted and disjoint."""

from bisect import bisect_left, bisect_right
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
    if len(left) == 1:
        left, right = right, left
    if len(right) == 1:
        return _within(left, *right[0])
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        (start, end), (other_start, other_end) = left[i], right[j]
        start = max(start, other_start)
        if end <= other_end:
            i += 1
        else:
            end = other_end
            j += 1
        if start < end:
            common.append((start, end))
    return tuple(common)


def _within(intervals: Intervals, start: float, end: float) -> Intervals:
    """The points from `start` to `end`."""
    first = bisect_right(intervals, start, key=lambda interval: interval[1])
    last = bisect_left(intervals, end, key=lambda interval: interval[0])
    found = intervals[first:last]
    if found and (found[0][0] < start or found[-1][1] > end):
        cut = [(max(start, found[0][0]), min(end, found[0][1])), *found[1:]]
        cut[-1] = (cut[-1][0], min(end, cut[-1][1]))
        return tuple(cut)
    return found


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """The points in `left` that are not in `right`."""
    rest: list[Interval] = []
    j = 0
    for start, end in left:
        cursor = start
        while j < len(right) and right[j][1] <= cursor:
            j += 1
        while j < len(right) and right[j][0] < end:
            other_start, other_end = right[j]
            if cursor < other_start:
                rest.append((cursor, other_start))
            cursor = other_end
            if other_end > end:
                break
            j += 1
        if cursor < end:
            rest.append((cursor, end))
    return tuple(rest)


def length(intervals: Intervals) -> float:
    """Seconds covered."""
    return fsum(end - start for start, end in intervals)
