"""The parts of a flow, what goes from which to which, and their order once circles are taken as one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from rlix.flow.planner.tables import Table
from rlix.protocol.errors import SpecError
from rlix.workers.counts import check_count, is_count

MOST_PARTS = 8


def check_shape(name: str, unit: int, most: int | None, chunk: int, cpu_ranks: int) -> None:
    """Raises SpecError: one of these numbers of a part makes no sense."""
    given = {"unit": unit, "most": 1 if most is None else most, "chunk": chunk, "cpu_ranks": cpu_ranks}
    for what, value in given.items():
        check_count(f"{name}: {what}", value, 0 if what == "cpu_ranks" else 1)


@dataclass(frozen=True, slots=True)
class Component:
    """One part: what it costs and what it can run on.

    Args:
        table: of calls, by number of ranks.
        unit: devices of one rank.
        most: ranks it can use at most.
        widths: numbers of ranks that it can run on; empty: any.
        load_s, offload_s: of bringing its state onto its devices and off them, which all its ranks do at once.
        chunk: a batch given to it must be a multiple of this.
        cpu_ranks: it runs on so many ranks that need no device (a simulator); 0: it runs on devices.
        streams: its ranks take items as they become free, so that on devices of its own it waits for no chunk's end.
    """

    name: str
    table: Table
    unit: int = 1
    most: int | None = None
    widths: tuple[int, ...] = ()
    load_s: float = 0.0
    offload_s: float = 0.0
    chunk: int = 1
    cpu_ranks: int = 0
    streams: bool = False

    def __post_init__(self) -> None:
        check_shape(self.name, self.unit, self.most, self.chunk, self.cpu_ranks)
        if not (0 <= self.load_s < inf and 0 <= self.offload_s < inf):  # NaN is none
            raise SpecError(f"{self.name}: load_s and offload_s are seconds, from 0 on")

    @property
    def switch_s(self) -> float:
        return 0.0 if self.cpu_ranks else self.load_s + self.offload_s


@dataclass(frozen=True, slots=True)
class Edge:
    """Items go from one part to another; between different devices that takes `latency_s` + `item_s` for each item.

    `rounds`: of an edge that closes a circle, how often each item goes round. `ahead`: the source may make the next
    step's items while the target works on this one's.
    """

    source: str
    target: str
    latency_s: float = 0.0
    item_s: float = 0.0
    rounds: int = 0
    ahead: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < inf and 0 <= self.item_s < inf):
            raise SpecError(f"{self.source} → {self.target}: latency_s and item_s are seconds, from 0 on")


@dataclass(frozen=True, slots=True)
class Node:
    """A part, or a circle of several which are planned as one."""

    parts: tuple[Component, ...]
    rounds: int = 1

    @property
    def name(self) -> str:
        return "⟲".join(part.name for part in self.parts)


class Graph:
    """Parts and edges of one step.

    Raises:
        SpecError: a name is used twice or not known, or a circle does not say how often items go round.
    """

    def __init__(self, components: Sequence[Component], edges: Sequence[Edge] = ()) -> None:
        self.components = {part.name: part for part in components}
        self.edges = tuple(edges)
        if not components or len(components) > MOST_PARTS:
            raise SpecError(f"a flow has 1 to {MOST_PARTS} parts, not {len(components)}")
        if len(self.components) < len(components):
            raise SpecError("two parts of the flow have the same name")
        for edge in edges:
            for name in (edge.source, edge.target):
                if name not in self.components:
                    raise SpecError(f"an edge names {name!r}; the parts are {', '.join(self.components)}")
        self.nodes  # noqa: B018 (a circle without rounds is refused here)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """In an order in which whatever is made is made before it is used."""
        reach = {name: self._reachable(name) for name in self.components}
        circles: list[tuple[str, ...]] = []
        for name in self.components:
            circle = tuple(o for o in self.components if o == name or (o in reach[name] and name in reach[o]))
            if circle not in circles:
                circles.append(circle)
        ordered: list[tuple[str, ...]] = []
        while left := [circle for circle in circles if circle not in ordered]:
            ordered.append(next(c for c in left if not any(self._feeds(o, c) for o in left if o != c)))
        return tuple(self._node(circle) for circle in ordered)

    @cached_property
    def fed(self) -> tuple[int, ...]:
        """By set of nodes the set of those that need what it makes."""
        found = [0]
        for i, node in enumerate(self.nodes):
            mine = sum(1 << j for j, other in enumerate(self.nodes) if i != j and self.feeds(node, other))
            found += [others | mine for others in found]
        return tuple(found)

    def feeds(self, source: Node, target: Node) -> bool:
        return self._feeds([p.name for p in source.parts], [p.name for p in target.parts])

    def waits(self, source: Node, target: Node) -> bool:
        """Whether `target` begins a step only when `source` has ended it."""
        mine, theirs = ({part.name for part in node.parts} for node in (target, source))
        return any(e.source in theirs and e.target in mine and not e.ahead for e in self.edges)

    def transfer_s(self, sources: Sequence[Node], target: Node, items: int) -> float:
        """What `target` waits for `items` items from these, which are on other devices."""
        before = {part.name for node in sources for part in node.parts}
        mine = {part.name for part in target.parts}
        costs = [e.latency_s + e.item_s * items for e in self.edges if e.source in before and e.target in mine]
        return sum(costs)

    def _node(self, circle: tuple[str, ...]) -> Node:
        parts = tuple(self.components[name] for name in circle)
        inside = [e for e in self.edges if e.source in circle and e.target in circle]
        if not inside:
            return Node(parts)
        rounds = max(edge.rounds for edge in inside)
        if not is_count(rounds):
            raise SpecError(f"{' → '.join(circle)} is a circle: its last edge needs `rounds`, a whole number")
        return Node(parts, rounds)

    def _feeds(self, sources: Sequence[str], targets: Sequence[str]) -> bool:
        return any(e.source in sources and e.target in targets for e in self.edges)

    def _reachable(self, start: str) -> set[str]:
        found: set[str] = set()
        edge = [start]
        while edge:
            name = edge.pop()
            new = {e.target for e in self.edges if e.source == name} - found
            found |= new
            edge += new
        return found


def ordered_partitions(graph: Graph, nodes: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut some of the graph's nodes into groups, one after the other, of which none needs what a later one
    makes. A set of nodes is a number, whose bit `i` stands for node `i`.

    Groups that do not depend on each other come in one order only: no group stands behind larger numbers that it could
    stand before.
    """
    yield from _cuts(graph.fed, nodes, ())


def _cuts(fed: Sequence[int], left: int, before: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not left:
        yield before
    group = -left & left
    while group:
        if not fed[left & ~group] & group and _in_order(fed, group, before):
            yield from _cuts(fed, left & ~group, (*before, group))
        group = (group - left) & left


def _in_order(fed: Sequence[int], group: int, before: tuple[int, ...]) -> bool:
    for other in reversed(before):
        if fed[other] & group:
            return True
        if group < other:
            return False
    return True
