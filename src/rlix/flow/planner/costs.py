"""What nodes of a flow cost on every number of devices at once, as arrays over 0..N."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlix.flow.planner.graph import Component, Node
from rlix.flow.planner.plan import LoopPlan, PartPlan
from rlix.flow.planner.rounds import rounds_s
from rlix.flow.planner.split import split
from rlix.flow.planner.tables import Array

SLICES = (1, 2, 4)
"""Into how many slices a circle's batch may be cut, so that its parts work at the same time on different ones."""
_LOOP_GRID = 32


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one batch, for `n` devices at index `n`: seconds, bytes of the fullest device, and who runs where.

    `at(n, first)`: the parts on `n` devices from number `first`, and the circle that they are, if they are one.
    """

    seconds: Array
    resident: Array
    peak: Array
    switch_s: float
    at: Callable[[int, int], tuple[tuple[PartPlan, ...], LoopPlan | None]]


class Costs:
    def __init__(self, devices: int, device_bytes: float) -> None:
        self.devices, self.device_bytes = devices, device_bytes
        self._parts: dict[tuple[str, int], Cost] = {}
        self._nodes: dict[tuple[str, int], Cost] = {}

    def node(self, node: Node, items: int) -> Cost:
        key = (node.name, items)
        if key not in self._nodes:
            self._nodes[key] = self.part(node.parts[0], items) if len(node.parts) == 1 else self._loop(node, items)
        return self._nodes[key]

    def stage(self, nodes: Sequence[Node], items: int, chunks: int) -> list[Cost]:
        """Of nodes on the same devices, for each of `chunks` chunks of `items` items.

        One that streams, alone there, ends no chunk before it begins the next: it takes what all of them take at once.
        """
        if len(nodes) == 1 and len(nodes[0].parts) == 1 and nodes[0].parts[0].streams and chunks > 1:
            return [self._streamed(nodes[0].parts[0], items, chunks)]
        return [self.node(node, items) for node in nodes]

    def _streamed(self, part: Component, items: int, chunks: int) -> Cost:
        whole = self.part(part, items * chunks)

        def at(devices: int, first: int) -> tuple[tuple[PartPlan, ...], None]:
            ((placed,), _) = whole.at(devices, first)
            return (replace(placed, seconds=placed.seconds / chunks),), None

        return replace(whole, seconds=whole.seconds / chunks, at=at)

    def together(self, costs: Sequence[Cost]) -> NDArray[np.bool_]:
        """Whether the states of all stay on the same devices while each works in turn."""
        resident = sum((cost.resident for cost in costs), np.zeros(self.devices + 1))
        work = np.max([cost.peak - cost.resident for cost in costs], axis=0)
        return np.asarray(resident + work <= self.device_bytes)

    def in_turn(self, costs: Sequence[Cost]) -> tuple[Array, Array]:
        """Seconds of nodes that take turns on the same devices, and those of it that go to loading and offloading."""
        seconds = sum((cost.seconds for cost in costs), np.zeros(self.devices + 1))
        if len(costs) < 2:
            return seconds, np.zeros(self.devices + 1)
        switch = np.where(self.together(costs), 0.0, sum(cost.switch_s for cost in costs))
        return seconds + switch, switch

    def part(self, part: Component, items: int) -> Cost:
        key = (part.name, items)
        if key not in self._parts:
            self._parts[key] = self._on_cpu(part, items) if part.cpu_ranks else self._on_devices(part, items)
        return self._parts[key]

    def _on_cpu(self, part: Component, items: int) -> Cost:
        nothing = np.zeros(self.devices + 1)
        seconds = part.table.seconds(part.cpu_ranks, items)

        def at(_devices: int, first: int) -> tuple[tuple[PartPlan, ...], None]:
            return (PartPlan(part.name, part.cpu_ranks, first, 0, seconds),), None

        return Cost(nothing + seconds, nothing, nothing, 0.0, at)

    def _on_devices(self, part: Component, items: int) -> Cost:
        most = max(1, min(self.devices // part.unit, part.most or self.devices, items))
        widths = np.arange(1, most + 1)
        peak, resident = part.table.peak_bytes(widths, items), part.table.resident_bytes(widths)
        fits = np.maximum(peak, resident) <= self.device_bytes
        if part.widths:
            fits &= np.isin(widths, part.widths)
        seconds = np.where(fits, part.table.seconds_by_width(widths, items), np.inf)
        least = np.minimum.accumulate(seconds)  # more devices than help are left alone
        better = seconds < np.concatenate([[np.inf], least[:-1]])
        chosen = np.maximum.accumulate(np.where(better, widths, 1))
        ranks = np.concatenate([[0], chosen[np.minimum(np.arange(1, self.devices + 1) // part.unit, most) - 1]])
        ranks[: part.unit] = 0
        index = np.maximum(ranks, 1) - 1
        of_n = np.where(ranks > 0, least[index], np.inf)
        fullest = np.maximum(peak, resident)[index]

        def at(devices: int, first: int) -> tuple[tuple[PartPlan, ...], None]:
            count = int(ranks[devices])
            seconds, most_bytes = float(of_n[devices]), float(fullest[devices])
            return (PartPlan(part.name, count, first, count * part.unit, seconds, most_bytes),), None

        return Cost(of_n, resident[index], fullest, part.switch_s, at)

    def _loop(self, node: Node, items: int) -> Cost:
        """A circle: its parts in turn on the same devices, or beside each other on different slices of the batch."""
        grid = sorted({round(n) for n in np.linspace(0, self.devices, min(self.devices, _LOOP_GRID) + 1)})
        found = [self._best_loop(node, items, n) for n in grid]
        for i in range(1, len(found)):
            if found[i - 1].seconds <= found[i].seconds:
                found[i] = found[i - 1]
        below = np.searchsorted(grid, np.arange(self.devices + 1), side="right") - 1

        def at(devices: int, first: int) -> tuple[tuple[PartPlan, ...], LoopPlan]:
            loop = found[below[devices]]
            costs = [self.part(part, items // loop.slices) for part in node.parts]
            parts: list[PartPlan] = []
            offset = first
            for cost, share in zip(costs, loop.shares, strict=True):
                parts += cost.at(share, offset)[0]
                offset += 0 if loop.shared else share
            names = tuple(part.name for part in node.parts)
            return tuple(parts), LoopPlan(names, node.rounds, loop.slices, loop.shared, loop.together)

        values = np.array([(loop.seconds, loop.resident, loop.peak) for loop in found])[below]
        switch_s = sum(part.switch_s for part in node.parts)
        return Cost(values[:, 0], values[:, 1], values[:, 2], switch_s, at)

    def _best_loop(self, node: Node, items: int, devices: int) -> "_Loop":
        costs = [self.part(part, items) for part in node.parts]
        seconds, _ = self.in_turn(costs)
        together = bool(self.together(costs)[devices])
        resident = [float(cost.resident[devices]) for cost in costs]
        work = [float(cost.peak[devices]) - held for cost, held in zip(costs, resident, strict=True)]
        held = sum(resident) if together else max(resident)
        turns_s = node.rounds * float(seconds[devices])
        best = _Loop(turns_s, 1, True, (devices,) * len(costs), held, held + max(work), together)
        for slices in SLICES:
            if items % slices == 0 and all((items // slices) % part.chunk == 0 for part in node.parts):
                best = min(best, self._apart(node, items // slices, slices, devices), key=lambda loop: loop.seconds)
        return best

    def _apart(self, node: Node, items: int, slices: int, devices: int) -> "_Loop":
        costs = [self.part(part, items) for part in node.parts]
        on_devices = [i for i, part in enumerate(node.parts) if not part.cpu_ranks]
        fixed = [float(costs[i].seconds[0]) for i in range(len(costs)) if i not in on_devices]

        def all_rounds(stages: list[Array]) -> Array:
            once = sum(stages, np.zeros(())) + sum(fixed)
            longest = np.max(np.stack(stages), axis=0) if stages else np.zeros(())
            return rounds_s(node.rounds, slices, once, np.maximum(longest, max(fixed, default=0.0)))

        shares: tuple[int, ...] = ()
        if on_devices:
            shares, least = split([costs[i].seconds for i in on_devices], devices, all_rounds)
        else:
            least = float(all_rounds([]))
        given = dict(zip(on_devices, shares, strict=True))
        placed = [(cost, given.get(i, 0)) for i, cost in enumerate(costs)]
        resident = max(float(cost.resident[n]) for cost, n in placed)
        peak = max(float(cost.peak[n]) for cost, n in placed)
        return _Loop(least, slices, False, tuple(n for _, n in placed), resident, peak)


@dataclass(frozen=True, slots=True)
class _Loop:
    seconds: float
    slices: int
    shared: bool
    shares: tuple[int, ...]
    resident: float
    peak: float
    together: bool = True
