"""How many devices each of several stages gets: the cheapest of all splits, found in milliseconds."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

from rlix.flow.planner.tables import Array

Cost = Callable[[list[Array]], Array]
"""Seconds of each of many splits, from the stages' seconds in them."""

_GRID = {1: 1 << 20, 2: 1 << 14, 3: 128, 4: 40, 5: 24, 6: 16, 7: 12, 8: 12}
"""Into how many equal parts the devices are cut, by the number of stages: some 10,000 splits at most."""


def split(times: Sequence[Array], total: int, cost: Cost) -> tuple[tuple[int, ...], float]:
    """Devices for each stage, `total` together, and what that costs (infinity: no split will do).

    `times[i][n]` are the seconds of stage `i` on `n` devices; they must not grow with `n`. All splits are looked at
    where the devices are few (up to 128 for three stages); of more, all splits into equal portions, and then those near
    the best.
    """
    count = len(times)
    if total < count:
        return (0,) * count, float("inf")
    unit = max(1, min(-(-total // _GRID[count]), total // count))
    shares = _compositions(total // unit, count) * unit
    shares[:, -1] += total - unit * (total // unit)
    best, least = _cheapest(times, shares, cost)
    while unit > 1 and np.isfinite(least):
        unit = -(-unit // 2)
        moved = _cheapest(times, np.stack([best, *_moves(best, unit)]), cost)
        while moved[1] < least:
            best, least = moved
            moved = _cheapest(times, np.stack([best, *_moves(best, unit)]), cost)
    return tuple(int(n) for n in best), least


def _cheapest(times: Sequence[Array], shares: NDArray[np.int64], cost: Cost) -> tuple[NDArray[np.int64], float]:
    costs = cost([seconds[shares[:, i]] for i, seconds in enumerate(times)])
    index = int(np.argmin(costs))
    return shares[index], float(costs[index])


def _moves(shares: NDArray[np.int64], step: int) -> list[NDArray[np.int64]]:
    """Splits that differ by `step` devices given from one stage to another."""
    moves = []
    for giver, taker in permutations(range(len(shares)), 2):
        if shares[giver] > step:
            moved = shares.copy()
            moved[giver] -= step
            moved[taker] += step
            moves.append(moved)
    return moves


def _compositions(total: int, count: int) -> NDArray[np.int64]:
    return _all_compositions(total, count).copy()


@cache
def _all_compositions(total: int, count: int) -> NDArray[np.int64]:
    """All ways to write `total` as a sum of `count` numbers of at least 1, one in each row."""
    if count == 1:
        return np.array([[total]], dtype=np.int64)
    if count == 2:
        first = np.arange(1, total, dtype=np.int64)
        return np.stack([first, total - first], axis=1)
    if count == 3:
        first, second = np.triu_indices(total - 1, k=1)
        return np.stack([first + 1, second - first, total - 1 - second], axis=1).astype(np.int64)
    bars = np.array(list(combinations(range(1, total), count - 1)), dtype=np.int64)
    ends = np.hstack([np.zeros((len(bars), 1), np.int64), bars, np.full((len(bars), 1), total, np.int64)])
    return np.diff(ends, axis=1)
