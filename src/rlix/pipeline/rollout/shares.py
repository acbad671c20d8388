"""How the trajectories of a job's adapters share its replicas: whoever has least there goes next. Pure."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """An adapter's trajectories: how many are still to come, and how many of those replicas have now."""

    to_come: int = 0
    in_flight: int = 0


def shares(to_come: Mapping[tuple[str, str], int], in_flight: Mapping[str, int]) -> dict[str, Share]:
    """Of each adapter, whatever its trajectories are for; `to_come` by adapter and purpose."""
    counts: dict[str, int] = {}
    for (adapter, _), count in to_come.items():
        counts[adapter] = counts.get(adapter, 0) + count
    return {adapter: Share(count, in_flight.get(adapter, 0)) for adapter, count in counts.items()}


def next_owner(waiting: Mapping[str, int], in_flight: Mapping[str, int]) -> str:
    """Of those who have something waiting, the one with least in flight; of equals the one named first.

    Taken again and again it gives everybody the same share, and what somebody does not need to the others: nobody
    with something waiting has two less than anybody else was given while he waited.
    """
    return min((owner for owner, count in waiting.items() if count), key=lambda owner: in_flight.get(owner, 0))


class FairQueue:
    """A line of ids for each owner."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[str]] = {}

    def __bool__(self) -> bool:
        return any(self._lines.values())

    def append(self, owner: str, id: str) -> None:
        self._lines.setdefault(owner, deque()).append(id)

    def appendleft(self, owner: str, id: str) -> None:
        self._lines.setdefault(owner, deque()).appendleft(id)

    def popleft(self, in_flight: Mapping[str, int]) -> str:
        """The first id of the owner whose turn it is; `in_flight` counts by owner."""
        waiting = {owner: len(line) for owner, line in self._lines.items()}
        return self._lines[next_owner(waiting, in_flight)].popleft()

    def discard(self, ids: Collection[str]) -> None:
        """Forget these, wherever they stand."""
        self._lines = {o: deque(id for id in line if id not in ids) for o, line in self._lines.items()}
