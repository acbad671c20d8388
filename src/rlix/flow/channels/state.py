"""What a channel knows: a pure state machine, without clock, processes or payloads."""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import attrgetter

from rlix.flow.counts import is_count
from rlix.protocol.errors import ChannelError, SpecError

Rule = Callable[[Sequence["Item"], "Want"], Sequence[int]]
"""A user's dequeue rule: of the items in the order they came, the ids of those to hand out; none: wait."""


@dataclass(frozen=True, slots=True)
class Item:
    """An item's card. Ids grow in the order of arrival; `sequence` counts within its producer."""

    id: int
    producer: str
    sequence: int
    key: str = ""
    weight: float = 1.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """What a consumer asks for: items of this key (None: any), so many, and no more weight together than this.

    The first one is given whatever its weight.
    """

    count: int = 1
    key: str | None = None
    weight: float = float("inf")

    def __post_init__(self) -> None:
        if not is_count(self.count):
            raise SpecError(f"{self}: count is a whole number from 1 on")
        check_card(self.key, self.weight)


def check_card(key: object, weight: object) -> None:
    """Raises SpecError: items are not told apart or weighed by these."""
    if not isinstance(key, str | None) or not isinstance(weight, Real):
        raise SpecError(f"an item's key is text and its weight a number, not {key!r} and {weight!r}")


def oldest_first(items: Sequence[Item], want: Want) -> list[int]:
    chosen: list[int] = []
    weight = 0.0
    for item in items:
        if want.key is not None and item.key != want.key:
            continue
        if len(chosen) == want.count or (chosen and weight + item.weight > want.weight):
            break
        chosen.append(item.id)
        weight += item.weight
    return chosen


@dataclass(slots=True)
class _Group:
    """Consumers of which one gets each item: what waits for them, and what is with whom and not acknowledged."""

    waiting: list[Item] = field(default_factory=list)
    taken: dict[int, tuple[str, Item]] = field(default_factory=dict)

    def left(self) -> int:
        return len(self.waiting) + len(self.taken)


class ChannelState:
    """Items from producers to groups of consumers.

    An item that `put` accepted goes to one consumer of each group and takes room until each group has acknowledged it.
    One whose consumer is lost before that goes back to its place. The stream ends for a group when every producer has
    closed and everything is acknowledged: until then a lost consumer's item may still come back. If a producer was
    lost, what it had put is handed out; then there is an error in place of the end, unless it has registered again.
    """

    def __init__(
        self,
        capacity: int,
        capacity_bytes: int | None = None,
        groups: Sequence[str] = ("",),
        rule: Rule = oldest_first,
    ) -> None:
        room = {"capacity": capacity, "capacity_bytes": 1 if capacity_bytes is None else capacity_bytes}
        for what, value in room.items():
            if not is_count(value):
                raise SpecError(f"{what} must be a whole number from 1 on, got {value!r}")
        if not groups or len(set(groups)) < len(groups) or not all(isinstance(name, str) for name in groups):
            raise SpecError(f"groups must be one or more different names, got {list(groups)}")
        if not callable(rule):
            raise SpecError(f"rule is a function that chooses among items, got {rule!r}")
        self.capacity, self.capacity_bytes = capacity, capacity_bytes
        self.failure: str | None = None
        self.items: dict[int, Item] = {}  # not yet acknowledged by every group
        self._groups = {name: _Group() for name in groups}
        self._rule = rule
        self._open: set[str] = set()
        self._lost: set[str] = set()
        self._sequences: dict[str, int] = {}
        self._next_id = 0

    @property
    def producers(self) -> tuple[str, ...]:
        return tuple(sorted(self._open))

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items.values())

    def register(self, name: str) -> int:
        """Opens a producer, or a lost one again; returns the sequence number it goes on with.

        Raises:
            ChannelError: it is open, or the stream has failed or ended.
        """
        self._check()
        if name in self._open:
            raise ChannelError(f"a producer named {name!r} is open already")
        if self._sequences and not self._open and not self._lost:
            raise ChannelError("cannot register a producer: the stream has ended")
        self._lost.discard(name)
        self._open.add(name)
        return self._sequences.setdefault(name, 0)

    def adopt(self, name: str) -> int:
        """Opens a lost producer again; returns the number of the next item of this one, or of one that is open.

        Raises:
            ChannelError: it has closed, or the stream has failed.
        """
        if name in self._lost:
            return self.register(name)
        if name not in self._open:
            raise ChannelError(f"producer {name!r} has closed and cannot put")
        return self._sequences[name]

    def has_room(self, nbytes: int = 0) -> bool:
        """An item larger than all room is let in alone."""
        if len(self.items) >= self.capacity:
            return False
        return self.capacity_bytes is None or not self.items or self.nbytes + nbytes <= self.capacity_bytes

    def put(self, producer: str, sequence: int, key: str = "", weight: float = 1.0, nbytes: int = 0) -> Item | None:
        """Accepts an item; None: its number was used before. Ask `has_room` first.

        Raises:
            ChannelError: the producer is not open, left out a number, or the stream has failed.
        """
        self._check()
        if producer not in self._open:
            raise ChannelError(f"producer {producer!r} has closed and cannot put")
        expected = self._sequences[producer]
        if self.accepted(producer, sequence):
            return None
        if sequence > expected:
            raise ChannelError(f"producer {producer!r} put item {sequence}, but {expected} is next")
        self._sequences[producer] = expected + 1
        item = Item(self._next_id, producer, sequence, key, weight, nbytes)
        self._next_id += 1
        self.items[item.id] = item
        for group in self._groups.values():
            group.waiting.append(item)
        return item

    def accepted(self, producer: str, sequence: int) -> bool:
        """Whether this number was used before."""
        return sequence < self._sequences[producer]

    def withdraw(self, producer: str, sequence: int) -> bool:
        """Uses up an item's number, so that a late `put` of it does nothing; True: it was accepted before."""
        accepted = self.accepted(producer, sequence)
        self._sequences[producer] = max(self._sequences[producer], sequence + 1)
        return accepted

    def take(self, consumer: str, want: Want | None = None, group: str = "") -> list[Item]:
        """Hands out what the rule chooses; [] is nothing yet.

        Raises:
            ChannelError: the stream has failed, the rule chose what is not there, or all is taken of a producer that
                was lost.
        """
        self._check()
        mine = self._group(group)
        chosen = list(self._rule(tuple(mine.waiting), want or Want()))
        by_id = {item.id: item for item in mine.waiting}
        if len(set(chosen)) < len(chosen) or not by_id.keys() >= set(chosen):
            raise ChannelError(f"the dequeue rule chose {chosen} of {sorted(by_id)}")
        if not chosen and self._lost and not mine.waiting and not mine.taken:
            names = ", ".join(repr(name) for name in sorted(self._lost))
            raise ChannelError(f"producer {names} ended without closing; what it had put has been taken")
        mine.waiting = [item for item in mine.waiting if item.id not in chosen]
        mine.taken |= {id: (consumer, by_id[id]) for id in chosen}
        return [by_id[id] for id in chosen]

    def acknowledge(self, consumer: str, ids: Iterable[int], group: str = "") -> list[Item]:
        """Notes that `consumer` is done with these; returns those that everybody is done with.

        What was given to somebody else since, because `consumer` was thought lost, is not its to acknowledge.
        """
        mine = self._group(group)
        for id in ids:
            if mine.taken.get(id, ("", None))[0] == consumer:
                del mine.taken[id]
        return self._forget_done()

    def give_back(self, consumer: str) -> None:
        """What `consumer` took and has not acknowledged goes back to its place."""
        for group in self._groups.values():
            for id, (holder, item) in list(group.taken.items()):
                if holder == consumer:
                    del group.taken[id]
                    insort(group.waiting, item, key=attrgetter("id"))

    def close(self, producer: str) -> None:
        self._open.discard(producer)

    def lose_producer(self, producer: str) -> None:
        if producer in self._open:
            self._open.discard(producer)
            self._lost.add(producer)

    def fail(self, reason: str) -> list[Item]:
        """Ends the stream for everybody; returns what is dropped. The first failure is the cause of the others."""
        self.failure = self.failure or reason
        dropped = list(self.items.values())
        self.items.clear()
        for group in self._groups.values():
            group.waiting.clear()
            group.taken.clear()
        return dropped

    def ended(self, group: str = "") -> bool:
        mine = self._group(group)
        no_more = bool(self._sequences) and not self._open and not self._lost
        return no_more and not mine.waiting and not mine.taken

    def consumers(self) -> set[str]:
        """Those with something that is not acknowledged."""
        return {holder for group in self._groups.values() for holder, _ in group.taken.values()}

    def describe(self, group: str | None = None) -> str:
        """Of this group, or of the one that has most to do yet."""
        mine = self._group(group) if group is not None else max(self._groups.values(), key=_Group.left)
        out = f", {len(mine.taken)} with {', '.join(sorted({h for h, _ in mine.taken.values()}))}" if mine.taken else ""
        queued = f"{len(mine.waiting)}/{self.capacity} items queued{out}"
        return f"{queued}, open producers: {', '.join(self.producers) or 'none'}"

    def _group(self, name: str) -> _Group:
        if name not in self._groups:
            raise ChannelError(f"no consumer group {name!r}; there are {sorted(self._groups)}")
        return self._groups[name]

    def _check(self) -> None:
        if self.failure is not None:
            raise ChannelError(self.failure)

    def _forget_done(self) -> list[Item]:
        held = {item.id for group in self._groups.values() for item in group.waiting}
        held |= {id for group in self._groups.values() for id in group.taken}
        done = [item for id, item in self.items.items() if id not in held]
        for item in done:
            del self.items[item.id]
        return done
