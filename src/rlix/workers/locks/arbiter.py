"""Which part of a job has which of its devices: a pure arbiter of turns.

A turn wants a set of devices, all at once. It is granted when nobody has one of its devices, and no turn before it in
the order waits for one. Whoever has a turn asks for no further devices, so there is no circle of hold and wait.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rlix.protocol.errors import DeadlockError


@dataclass(frozen=True, slots=True)
class Turn:
    """A claim. `order`: smaller goes first, and who asked first among equals."""

    id: int
    holder: str
    devices: frozenset[int]
    order: tuple[Any, ...] = ()


@dataclass(slots=True)
class Arbiter:
    """`waiting` and `held` are turns by id; `depth` counts how often a holder has entered the turn that it has."""

    waiting: dict[int, Turn] = field(default_factory=dict)
    held: dict[int, Turn] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=dict)
    _next: int = 0

    def ask(self, holder: str, devices: Collection[int], order: tuple[Any, ...] = ()) -> Turn:
        """A turn. Who has one with these devices keeps it.

        Raises:
            DeadlockError: the holder has a turn with other devices, and would wait for these while it keeps those.
        """
        wanted = frozenset(devices)
        mine = next((turn for turn in self.held.values() if turn.holder == holder), None)
        if mine is not None:
            if not wanted <= mine.devices:
                more = sorted(wanted - mine.devices)
                raise DeadlockError(f"{holder} has devices {sorted(mine.devices)} and may not wait for {more}")
            self.depth[mine.id] += 1
            return mine
        turn = Turn(self._next, holder, wanted, order)
        self._next += 1
        self.waiting[turn.id] = turn
        return turn

    def grant(self) -> list[Turn]:
        """Turns that begin now, in order."""
        begun = []
        for turn in sorted(self.waiting.values(), key=lambda turn: (turn.order, turn.id)):
            if not self.blockers(turn):
                del self.waiting[turn.id]
                self.held[turn.id] = turn
                self.depth[turn.id] = 1
                begun.append(turn)
        return begun

    def leave(self, id: int) -> bool:
        """The holder leaves; True when that was the outermost time and the turn is over."""
        self.depth[id] -= 1
        if self.depth[id]:
            return False
        del self.held[id], self.depth[id]
        return True

    def withdraw(self, id: int) -> None:
        self.waiting.pop(id, None)

    def blockers(self, turn: Turn) -> list[Turn]:
        """Turns that must be over, or begin, first."""
        held = [t for t in self.held.values() if t.devices & turn.devices]
        ahead = [
            t for t in self.waiting.values() if (t.order, t.id) < (turn.order, turn.id) and t.devices & turn.devices
        ]
        return held + ahead

    def explain(self, turn: Turn) -> str:
        """What a waiting turn waits for."""
        return ", ".join(f"{t.holder} (devices {sorted(t.devices)})" for t in self.blockers(turn)) or "nothing"
