"""Batches as pieces of lists in the object store: cut and joined by arithmetic, without touching what they hold."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from rlix.flow.even import bounds

Pieces: TypeAlias = list[tuple[Any, int, int]]
"""References to lists, each with the first index that counts and the one after the last."""


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
