"""Which devices a pipeline's clusters get when it asks for sizes. Pure: same input, same output.

A gang gets a *block*: consecutive devices of one node, from a multiple of its size on, where it fits in a node; else
consecutive whole bundles over several. Of all blocks it is the one that shares most with the pipeline's other gangs
(they are phases of one job and take turns anyway), then the one least crowded by other pipelines' gangs, then the
first. An elastic cluster gets whole bundles: those with its own gangs' devices first, then the least crowded.

Devices are ordered by node and by their number in it; ids need not be dense.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import chain, zip_longest

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Cluster, Device, Registration

MAX_ALTERNATIVES = 8
"""Blocks a gang is offered besides its own: each is looked at in every plan while the gang waits."""

Block = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a pipeline asks of one cluster: just these `devices`, or `most` of them (0: as many as there are).

    A gang that asks for `least` below `most` can also run on fewer, in multiples of the tensor-parallel size.
    `moves`: it can run on any block that suits it, and is told of others.
    """

    name: str
    tensor_parallel_size: int = 1
    elastic: bool = False
    devices: Block = ()
    least: int = 0
    most: int = 0
    moves: bool = True

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of devices a gang can run on, widest first."""
        size = self.tensor_parallel_size
        widest = self.most - self.most % size
        return tuple(range(widest, max(self.least or widest, 1) - 1, -size))


def place(
    wishes: Sequence[Wish], devices: Iterable[Device], others: Iterable[Registration] = ()
) -> tuple[Cluster, ...]:
    """One cluster for each wish, in the same order. `others` are the pipelines that have registered already.

    Raises:
        SpecError: the pool has no whole bundles for what a cluster asks; the message begins with the cluster's name.
    """
    pool = _Pool(devices, others)
    placed = {wish.name: _exactly(wish) for wish in wishes if wish.devices}
    gangs = [wish for wish in wishes if not wish.elastic and not wish.devices]
    own_on = Counter(chain.from_iterable(c.devices for c in placed.values() if not c.elastic))
    for wish in sorted(gangs, key=lambda w: -w.most):  # the wide ones first, so that the others fit inside
        own = dict.fromkeys(placed[w.name].devices for w in wishes if w.name in placed and not w.elastic)
        placed[wish.name] = _gang(wish, own, own_on, pool)
        own_on.update(placed[wish.name].devices)
    own_devices = frozenset(own_on)
    for wish in wishes:
        if wish.elastic and not wish.devices:
            placed[wish.name] = _rollout(wish, own_devices, pool)
    return tuple(placed[wish.name] for wish in wishes)


class Arrivals:
    """Devices that came to a pool, `devices` with them, for clusters that may run anywhere in it."""

    def __init__(self, devices: Iterable[Device], came: Set[int]) -> None:
        self._devices = {device.id: device for device in devices}
        self._pool, self._came = _Pool(self._devices.values(), ()), came
        self._blocks: dict[tuple[int, int], list[Block]] = {}
        self._turn = 0

    def offered(self, cluster: Cluster, last: Block | None = None) -> Cluster:
        """The cluster with blocks of them among its alternatives, before others of that width, of which some go if
        there are too many, but not `last`, where its gang last was. Each cluster is offered others first, so that they
        do not all go to the same."""
        shape = len(cluster.devices), cluster.tensor_parallel_size
        if shape not in self._blocks:
            self._blocks[shape] = [block for block in self._pool.blocks(*shape) if not self._came.isdisjoint(block)]
        known = set(map(frozenset, cluster.choices))
        new = [block for block in self._blocks[shape] if frozenset(block) not in known]
        if not new:
            return cluster
        self._turn += 1
        at = self._turn % len(new)
        there = [block for block in cluster.alternatives if self._devices.keys() >= set(block)]
        there.sort(key=lambda block: block != last)
        offered = (new[at:] + new[:at])[: max(MAX_ALTERNATIVES // 2, MAX_ALTERNATIVES - len(there))]
        kept = there[: MAX_ALTERNATIVES - len(offered)]
        return replace(cluster, alternatives=tuple(sorted([*offered, *kept], key=lambda block: -len(block))))


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The devices in order, by node and together; of each its node's number and its position."""

    nodes: tuple[Block, ...]
    order: Block
    largest: int
    node_of: Mapping[int, int]
    at: Mapping[int, int]
    parts: dict[int, list[Block]] = field(default_factory=dict)  # by size, of those that somebody asked for
    whole: dict[int, Block] = field(default_factory=dict)  # all parts of that size together


_layouts: list[tuple[tuple[Device, ...], _Layout]] = []
"""Kept of the last pools, for the pool stays the same while hundreds of jobs register. To hash one costs more."""


def _layout(devices: tuple[Device, ...]) -> _Layout:
    for known, layout in _layouts:
        if known is devices:
            return layout
    _layouts[:] = [(devices, _laid_out(devices)), *_layouts[:1]]
    return _layouts[0][1]


def _laid_out(devices: tuple[Device, ...]) -> _Layout:
    by_node: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda d: d.id):
        by_node.setdefault(device.node_id, []).append(device)
    nodes = tuple(tuple(d.id for d in sorted(node, key=lambda d: (d.index, d.id))) for node in by_node.values())
    order = tuple(chain.from_iterable(nodes))
    return _Layout(
        nodes,
        order,
        max(map(len, nodes), default=0),
        {device: number for number, node in enumerate(nodes) for device in node},
        {device: position for position, device in enumerate(order)},
    )


class _Pool:
    """The devices in order, cut as needed, and how many gang clusters of other pipelines are declared on each."""

    def __init__(self, devices: Iterable[Device], others: Iterable[Registration]) -> None:
        layout = _layout(tuple(devices))
        self._nodes, self._order, self._largest = layout.nodes, layout.order, layout.largest
        self._parts, self._whole = layout.parts, layout.whole
        self._node_of, self._at = layout.node_of, layout.at
        self._gangs_on = dict.fromkeys(self._at, 0)
        for cluster in chain.from_iterable(other.clusters for other in others):
            for device in () if cluster.elastic else cluster.devices:
                self._gangs_on[device] = self._gangs_on.get(device, 0) + 1

    def bundles(self, size: int) -> list[Block]:
        """The pool cut into parts of `size`; none crosses nodes where one fits in a node."""
        if size not in self._parts:
            runs = self._nodes if size <= self._largest else [self._order]
            self._parts[size] = [run[at : at + size] for run in runs for at in range(0, len(run) - size + 1, size)]
        return self._parts[size]

    def whole(self, size: int) -> Block:
        """All of it in parts of `size`: the same tuple for whoever asks for that."""
        if size not in self._whole:
            self._whole[size] = tuple(chain.from_iterable(self.bundles(size)))
        return self._whole[size]

    def blocks(self, size: int, bundle: int) -> list[Block]:
        if size <= self._largest:
            return self.bundles(size)
        bundles, count = self.bundles(bundle), size // bundle
        starts = range(0, len(bundles) - count + 1, count)
        return [tuple(chain.from_iterable(bundles[start : start + count])) for start in starts]

    def inside(self, blocks: Iterable[Block], size: int, bundle: int) -> list[Block]:
        """What fits into blocks that are given already, and crosses nodes no more than it must."""
        unit = size if size <= self._largest else bundle
        parts = (block[start : start + size] for block in blocks for start in range(0, len(block) - size + 1, size))
        return [part for part in parts if unit > self._largest or self._on_one_node(part, unit)]

    def crowding(self, block: Block) -> tuple[int, int, int]:
        """Orders blocks: the longest queue on one device, all queues together, the place in the pool."""
        counts = [self._gangs_on[device] for device in block]
        return max(counts), sum(counts), self._at[block[0]]

    def move(self, origin: Block, block: Block) -> tuple[int, int, bool, int, int]:
        """Orders the blocks that a gang at `origin` may move to: the least crowded first, then the nearest."""
        longest, total, at = self.crowding(block)
        elsewhere = self._node_of[block[0]] != self._node_of[origin[0]]
        return longest, total, elsewhere, abs(at - self._at[origin[0]]), at

    def _on_one_node(self, part: Block, unit: int) -> bool:
        starts = range(0, len(part), unit)
        return all(len({self._node_of.get(device) for device in part[s : s + unit]}) == 1 for s in starts)


def _exactly(wish: Wish) -> Cluster:
    return Cluster(wish.name, wish.tensor_parallel_size, wish.devices, elastic=wish.elastic)


def _gang(wish: Wish, own: Iterable[Block], own_on: Mapping[int, int], pool: _Pool) -> Cluster:
    size, bundle = wish.widths[0], wish.tensor_parallel_size
    blocks = pool.blocks(size, bundle)
    if not blocks:
        raise _too_few(wish, size, pool)
    candidates = [*pool.inside(own, size, bundle), *blocks]
    chosen = min(candidates, key=lambda block: (-sum(own_on[device] for device in block), *pool.crowding(block)))
    alternatives = _alternatives(wish, chosen, frozenset(own_on), pool) if wish.moves else ()
    return Cluster(wish.name, bundle, chosen, alternatives, anywhere=wish.moves)


def _alternatives(wish: Wish, chosen: Block, own: frozenset[int], pool: _Pool) -> tuple[Block, ...]:
    """Other blocks, the widest first. Every width gets one before any gets a second, so that the cap leaves some.

    Where the pool has one, one of them is off the pipeline's own gangs, for a phase inside one of theirs.
    """
    by_width, known = [], set(chosen)
    for width in _spread(wish.widths):
        blocks = pool.blocks(width, wish.tensor_parallel_size)
        elsewhere = [block for block in blocks if len(block) != len(chosen) or set(block) != known]
        by_width.append(sorted(elsewhere, key=lambda block: pool.move(chosen, block)))
    turns = [block for turn in zip_longest(*by_width) for block in turn if block is not None]
    offered = turns[:MAX_ALTERNATIVES]
    apart = next((block for block in turns if own.isdisjoint(block)), None)
    if apart is not None and apart not in offered:
        offered[-1] = apart
    return tuple(sorted(offered, key=lambda block: -len(block)))


def _spread(widths: tuple[int, ...]) -> list[int]:
    """At most `MAX_ALTERNATIVES` of the widths: the widest, the narrowest, and evenly between."""
    if len(widths) <= MAX_ALTERNATIVES:
        return list(widths)
    return [widths[turn * (len(widths) - 1) // (MAX_ALTERNATIVES - 1)] for turn in range(MAX_ALTERNATIVES)]


def _rollout(wish: Wish, own: frozenset[int], pool: _Pool) -> Cluster:
    size = wish.tensor_parallel_size
    bundles = pool.bundles(size)
    count = wish.most // size if wish.most else len(bundles)
    if not bundles or count > len(bundles):
        raise _too_few(wish, wish.most or size, pool)
    if count == len(bundles):
        return Cluster(wish.name, size, pool.whole(size), elastic=True)
    first = nsmallest(count, bundles, key=lambda bundle: (-len(own.intersection(bundle)), *pool.crowding(bundle)))
    taken = frozenset(first)
    chosen = [bundle for bundle in bundles if bundle in taken]
    return Cluster(wish.name, size, tuple(chain.from_iterable(chosen)), elastic=True)


def _too_few(wish: Wish, wanted: int, pool: _Pool) -> SpecError:
    size = wish.tensor_parallel_size
    whole = len(pool.bundles(size)) * size
    return SpecError(
        f"cluster {wish.name!r}: {wanted} devices in bundles of {size} do not fit the pool: it has whole bundles of "
        f"{size} for {whole} devices; ask for fewer, or for a smaller tensor-parallel size"
    )
