"""Batches as pieces of lists in the object store: cut and joined by arithmetic, without touching what they hold."""

from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from rlix.workers.even import bounds

Pieces: TypeAlias = list[tuple[Any, int, int]]
"""References to `Items`, each with the first index that counts and the one after the last."""


def size(pieces: Pieces) -> int:
    return sum(stop - start for _, start, stop in pieces)


def cut(pieces: Pieces, begin: int, end: int) -> Pieces:
    """Items `begin` to `end` of the whole."""
    found: Pieces = []
    position = 0
    for ref, start, stop in pieces:
        low, high = max(begin, position), min(end, position + stop - start)
        if low < high:
            found.append((ref, start + low - position, start + high - position))
        position += stop - start
    return found


def shard(inputs: Sequence[Pieces], ranks: int) -> list[list[Pieces]]:
    """For each rank its share of every input: consecutive items, as evenly as can be, the fuller shares first."""
    shares = pairwise(bounds(size(inputs[0]), ranks))
    return [[cut(pieces, begin, end) for pieces in inputs] for begin, end in shares]


class Made:
    """What a part has made of a batch so far, wherever in it."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._found: dict[int, tuple[int, Pieces]] = {}

    def put(self, begin: int, end: int, pieces: Pieces) -> None:
        """Of items `begin` to `end`, of which nothing is there yet."""
        insort(self._begins, begin)
        self._found[begin] = end, pieces

    def has(self, begin: int, end: int) -> bool:
        while begin < end:
            at = bisect_right(self._begins, begin) - 1
            if at < 0 or (reached := self._found[self._begins[at]][0]) <= begin:
                return False
            begin = reached
        return True

    def cut(self, begin: int, end: int) -> Pieces:
        """Items that it has, one for each."""
        found: Pieces = []
        for start in self._begins[max(0, bisect_right(self._begins, begin) - 1) :]:
            if start >= end:
                break
            reached, pieces = self._found[start]
            found += cut(pieces, max(begin, start) - start, min(end, reached) - start)
        return found

    @property
    def whole(self) -> Pieces:
        """In order, however many items were made of how many."""
        return [piece for begin in self._begins for piece in self._found[begin][1]]
