"""What a segment takes at least, whatever its chunks and however its devices are split: what need not be looked at.

A bound may be too low, never too high. Two of them are used. Devices that all work all the time have done the work:
each stage's device-seconds, at its thriftiest, over the devices. And no stage can be slower than the segment: each
needs so many devices that it is not, and together they have no more than there are.
"""

from collections.abc import Sequence
from math import lcm

import numpy as np

from rlix.flow.planner.costs import Cost, Costs
from rlix.flow.planner.graph import Graph, Node
from rlix.flow.planner.tables import Array

Stage = tuple[list[Cost], Array, Array]
"""Costs of its nodes, and by number of devices its seconds for a chunk, and those of them that go to switching."""


class Bounds:
    """Of segments of a step of `items` items, in chunks of one of `sizes` that all its parts take.

    Groups of nodes are numbers, as of `ordered_partitions`.
    """

    def __init__(self, graph: Graph, items: int, sizes: Sequence[int], costs: Costs) -> None:
        self._nodes, self._items, self._sizes, self._costs = graph.nodes, items, sizes, costs
        self._groups: dict[int, tuple[Node, ...]] = {}
        self._taken: dict[int, list[int]] = {}
        self._stages: dict[tuple[int, int], Stage] = {}
        self._least: dict[int, Array] = {}
        self._in_chunks: dict[tuple[int, int], Array] = {}
        self._work: dict[int, float] = {}

    def nodes(self, group: int) -> tuple[Node, ...]:
        if group not in self._groups:
            self._groups[group] = tuple(node for i, node in enumerate(self._nodes) if group >> i & 1)
        return self._groups[group]

    def sizes(self, nodes: int) -> list[int]:
        """Of chunks that all parts of these nodes take."""
        if nodes not in self._taken:
            multiple = lcm(*(part.chunk for node in self.nodes(nodes) for part in node.parts))
            self._taken[nodes] = [size for size in self._sizes if size % multiple == 0]
        return self._taken[nodes]

    def stage(self, group: int, size: int) -> Stage:
        key = group, size
        if key not in self._stages:
            costs = self._costs.stage(self.nodes(group), size, self._items // size)
            self._stages[key] = costs, *self._costs.in_turn(costs)
        return self._stages[key]

    def least(self, group: int) -> Array:
        """Seconds of a stage's work for all chunks, by number of devices: in the chunks that are best for it."""
        if group not in self._least:
            sizes = self.sizes(group)
            every = [self.in_chunks(group, size) for size in sizes]
            if len(nodes := self.nodes(group)) == 1:  # one that streams costs another thing beside others in its stage
                every += [self._items // size * self._costs.node(nodes[0], size).seconds for size in sizes]
            self._least[group] = np.minimum.accumulate(np.min(every, axis=0))
        return self._least[group]

    def in_chunks(self, group: int, size: int) -> Array:
        """The same, in chunks of this size."""
        key = group, size
        if key not in self._in_chunks:
            self._in_chunks[key] = np.minimum.accumulate(self._items // size * self.stage(group, size)[1])
        return self._in_chunks[key]

    def work(self, group: int) -> float:
        """Device-seconds of a stage where it is thriftiest; on fewer devices than its parts fit on there is no time."""
        if group not in self._work:
            seconds = self.least(group)
            on_devices = any(not part.cpu_ranks for node in self.nodes(group) for part in node.parts)
            self._work[group] = float(np.min(seconds[1:] * np.arange(1, len(seconds)))) if on_devices else 0.0
        return self._work[group]

    def by_work(self, groups: Sequence[int]) -> float:
        """Of a segment of these stages, or of any that these nodes are."""
        longest = max(float(self.least(group)[-1]) for group in groups)
        return max(longest, sum(map(self.work, groups)) / self._costs.devices)

    def possible(self, groups: Sequence[int], below: float, size: int | None = None) -> bool:
        """Whether on some split no stage's work takes as long as `below`; `size`: in such chunks."""
        left = self._costs.devices
        for group in groups:
            least = self.least(group) if size is None else self.in_chunks(group, size)
            left -= int(np.count_nonzero(least >= below))  # so many devices are too few
            if left < 0:
                return False
        return True
