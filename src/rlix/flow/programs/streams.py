"""Items that ranks take as they become free, in place of shares of a batch with a wait for the slowest at its end."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from rlix.flow.parts.ranks import Ranks
from rlix.flow.programs.pieces import Pieces, cut, size

Bounds: TypeAlias = tuple[int, int]
"""From which item to which."""


class Claims:
    """Items `begin` to `end`, a few at a time, each to whoever asks first; the last may be fewer."""

    def __init__(self, begin: int, end: int, each: int) -> None:
        self._left = deque((at, min(end, at + each)) for at in range(begin, end, each))

    @property
    def over(self) -> bool:
        return not self._left

    def drop(self) -> None:
        """Nobody is to take what is left."""
        self._left.clear()

    def take(self, ready: Callable[[int, int], bool] = lambda begin, end: True) -> Bounds | None:
        """The first ones of those that are ready; None: none is, yet or any more."""
        for bounds in self._left:
            if ready(*bounds):
                self._left.remove(bounds)
                return bounds
        return None


def spread(
    group: Ranks,
    method: str,
    claim: Callable[[], Bounds | None],
    inputs: Callable[[int, int], Sequence[Pieces]],
    made: Callable[[Bounds, Pieces], None],
    failed: Callable[[BaseException], None],
) -> float:
    """Every rank takes what `claim` gives it, until that is None. Returns for how long the busiest one computed.

    The functions are called by several threads. `failed`, at once, with what a rank raised; `claim` is to give nothing
    to the others then. Raises that when all have ended what they do.
    """

    def work(rank: int) -> float:
        busy = 0.0
        try:
            while (bounds := claim()) is not None:
                given, began = [inputs(*bounds)], time.monotonic()
                (ref,), call = group.part(method, given, ranks=[rank])
                (count,) = group.counts(call)
                busy += time.monotonic() - began
                made(bounds, [(ref, 0, count)] if count else [])
        except BaseException as error:  # raised again: whatever it is, the other ranks must not wait for more
            failed(error)
            raise
        return busy

    with ThreadPoolExecutor(group.world_size, group.name) as threads:
        working = [threads.submit(work, rank) for rank in range(group.world_size)]
    return max(each.result() for each in working)


def spread_batch(
    group: Ranks, method: str, each: int, inputs: Sequence[Pieces], stopped: Callable[[], bool] = lambda: False
) -> Pieces:
    """A batch that is there already; what was made of it, in order. Ends early when it is `stopped`."""
    claims, claiming, found = Claims(0, size(inputs[0]), each), threading.Lock(), dict[Bounds, Pieces]()

    def claim() -> Bounds | None:
        with claiming:
            return None if stopped() else claims.take()

    def failed(_: BaseException) -> None:
        with claiming:
            claims.drop()

    spread(group, method, claim, lambda a, b: [cut(pieces, a, b) for pieces in inputs], found.__setitem__, failed)
    return [piece for bounds in sorted(found) for piece in found[bounds]]
