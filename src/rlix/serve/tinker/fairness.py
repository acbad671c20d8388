"""Whose turn it is: start-time fair queueing (Goyal, Vin and Cheng, 1996), by team, by user and by model."""

from collections.abc import Callable, Collection

Path = tuple[str, ...]
"""From the outermost group to whoever has turns: (team, user, model)."""


class FairOrder:
    """Among those that have something to do at each level, the one is next that was given least for its weight.

    Who had nothing to do for a while begins anew where the others are: what was not used meanwhile is nobody's, and
    what was used when nobody else waited is held against nobody.

    Args:
        weight: of a group, or of one in it.
    """

    def __init__(self, weight: Callable[[Path], float] = lambda _: 1.0) -> None:
        self._weight = weight
        self._clock: dict[Path, float] = {}  # of a group, in seconds for each unit of weight
        self._ends: dict[Path, float] = {}  # where on its group's clock what it was given ends

    def next(self, waiting: Collection[Path]) -> Path:
        """Of those that have something to do, one at least."""
        chosen: Path = ()
        left = list(waiting)
        while (here := len(chosen)) < len(left[0]):
            node = min(
                {path[: here + 1] for path in left}, key=lambda node: (self._starts(node), self._end(node), node)
            )
            self._clock[chosen] = self._starts(node)
            chosen, left = node, [path for path in left if path[: here + 1] == node]
        return chosen

    def charge(self, path: Path, seconds: float) -> None:
        """It was given these."""
        for depth in range(1, len(path) + 1):
            node = path[:depth]
            self._ends[node] = self._starts(node) + seconds / self._weight(node)

    def forget(self, path: Path) -> None:
        """It will have no more turns."""
        self._ends.pop(path, None)

    def _starts(self, node: Path) -> float:
        return max(self._clock.get(node[:-1], 0.0), self._end(node))

    def _end(self, node: Path) -> float:
        return self._ends.get(node, 0.0)
