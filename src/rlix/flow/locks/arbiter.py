"""Which part of a job has which of its devices: a pure arbiter of turns.

A turn wants a set of devices, all at once. It is granted when every party of it has asked, the turns that it comes
after are over, nobody has one of its devices, and no turn before it in the order only waits for one. Whoever has a turn
asks for no further devices, so there is no circle of hold and wait; what a turn comes after was asked for before it, so
there is none of waiting either.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from rlix.protocol.errors import DeadlockError


@dataclass(frozen=True, slots=True)
class Turn:
    """A claim. `order`: smaller goes first, and who asked first among equals. `parties`: those that must all ask."""

    id: int
    holder: str
    devices: frozenset[int]
    order: tuple[Any, ...] = ()
    after: frozenset[int] = frozenset()
    parties: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()


@dataclass(slots=True)
class Arbiter:
    """`waiting` and `held` are turns by id; `depth` counts how often a holder has entered the turn that it has."""

    waiting: dict[int, Turn] = field(default_factory=dict)
    held: dict[int, Turn] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=dict)
    _next: int = 0

    def ask(
        self,
        holder: str,
        devices: Collection[int],
        order: tuple[Any, ...] = (),
        *,
        after: Collection[int] = (),
        parties: Collection[str] = (),
        party: str = "",
    ) -> Turn:
        """A turn; of several `parties` each asks, and gets the same one. Who has a turn with these devices keeps it.

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
        turn = next((t for t in self.waiting.values() if t.holder == holder and party and party not in t.asked), None)
        if turn is None:
            unknown = [id for id in after if not 0 <= id < self._next]
            if unknown:
                raise ValueError(f"{holder} comes after turns {unknown}, which nobody has asked for")
            turn = Turn(self._next, holder, wanted, order, frozenset(after), frozenset(parties))
            self._next += 1
        turn = replace(turn, asked=turn.asked | {party})
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

    def lose(self, holder: str) -> list[Turn]:
        """The holder is dead and its bytes are gone: all its turns are over, and it waits for none."""
        mine = [turn for turn in (*self.held.values(), *self.waiting.values()) if turn.holder == holder]
        for turn in mine:
            self.held.pop(turn.id, None)
            self.depth.pop(turn.id, None)
            self.waiting.pop(turn.id, None)
        return mine

    def blockers(self, turn: Turn) -> list[Turn]:
        """Turns that must be over, or begin, first; the turn itself when a party of it has not asked."""
        missing = [turn] if turn.parties - turn.asked else []
        before = [t for t in (*self.held.values(), *self.waiting.values()) if t.id in turn.after]
        held = [t for t in self.held.values() if t.devices & turn.devices]
        ahead = [
            t
            for t in self.waiting.values()
            if (t.order, t.id) < (turn.order, turn.id) and t.devices & turn.devices and self._ready(t)
        ]
        return missing + before + held + ahead

    def _ready(self, turn: Turn) -> bool:
        """Whether it waits for devices only; one that does not stands in nobody's way."""
        return turn.parties <= turn.asked and turn.after.isdisjoint(self.waiting) and turn.after.isdisjoint(self.held)

    def explain(self, turn: Turn) -> str:
        """What a waiting turn waits for."""
        missing = sorted(turn.parties - turn.asked)
        who = [f"{t.holder} (devices {sorted(t.devices)})" for t in self.blockers(turn) if t.id != turn.id]
        return ", ".join(([f"{turn.holder}'s {', '.join(missing)} to ask"] if missing else []) + who) or "nothing"
