"""The fastest way to run a flow: over all cuts of its graph, all splits of the devices, and the sizes of chunks.

A plan is a sequence of segments, one after the other on all devices; in a segment, stages work beside each other on
chunks of the batch; in a stage, parts take turns for every chunk. A segment of stages with times t_i for each of m
chunks takes, on the longest of its paths, the sum of t_i (to fill and drain) and m-1 times the largest t_i. Where a
stage may work ahead of the next one, the path is cut there: neither waits for the other within a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm

import numpy as np

from rlix.flow.planner.costs import Cost, Costs
from rlix.flow.planner.graph import Graph, Node, ordered_partitions
from rlix.flow.planner.plan import SLACK, Mode, PartPlan, Plan, Planned, SegmentPlan, StagePlan
from rlix.flow.planner.split import split
from rlix.flow.planner.tables import Array
from rlix.protocol.errors import SpecError

MOST_CHUNK_SIZES = 24
MOST_CHUNKS = 256
KEPT = 6  # runners-up


def make_plan(
    graph: Graph,
    items: int,
    devices: int,
    *,
    device_bytes: float = float("inf"),
    mode: Mode | None = None,
    slack: float = SLACK,
) -> Planned:
    """The fastest plan for steps of `items` items on `devices` equal devices of `device_bytes` each.

    `mode`: the fastest of this mode, whatever others would take. Takes milliseconds for three parts.

    Of plans that are at most `slack` slower than the fastest, the one with the fewest stages: tables are no better.

    Raises:
        SpecError: there is no plan: the devices are too few or too small, or the batch cannot be divided.
    """
    search = _Search(graph, items, Costs(devices, device_bytes))
    plans = sorted(search.plans(), key=lambda plan: (plan.seconds, len(plan.segments), plan.shape))
    eligible = [plan for plan in plans if mode is None or plan.mode is mode]
    if not eligible:
        raise SpecError(_why_none(graph, items, devices, device_bytes, mode))
    close = [plan for plan in eligible if plan.seconds <= eligible[0].seconds * (1 + slack)]
    best = min(close, key=lambda plan: sum(len(segment.stages) - 1 for segment in plan.segments))
    plans.remove(best)
    fastest = {plan.mode: plan for plan in reversed(plans)}.values()  # of each mode
    others = plans[:KEPT] + [plan for plan in fastest if plan not in plans[:KEPT]]
    return Planned(best, tuple(others), _guesses(graph, best))


@dataclass(frozen=True, slots=True)
class _Segment:
    plan: SegmentPlan
    nodes: tuple[tuple[Node, ...], ...]
    load_s: float  # to bring its states on and off once; stages that switch for every chunk have it in their time


class _Search:
    def __init__(self, graph: Graph, items: int, costs: Costs) -> None:
        self.graph, self.items, self.costs = graph, items, costs
        self.sizes = _chunk_sizes(graph, items)
        self._segments: dict[tuple[str, ...], list[_Segment]] = {}

    def plans(self) -> Iterator[Plan]:
        """The best plan of each shape."""
        for cut in ordered_partitions(self.graph, self.graph.nodes):
            for segments in product(*(self.segments(nodes) for nodes in cut)):
                yield self._joined(segments)

    def segments(self, nodes: tuple[Node, ...]) -> list[_Segment]:
        """These nodes as one segment, in every way to group them to stages."""
        key = tuple(node.name for node in nodes)
        if key not in self._segments:
            cuts = ordered_partitions(self.graph, nodes)
            found = [self._segment(cut) for cut in cuts if len(cut) > 1 or len(nodes) == 1]
            self._segments[key] = [segment for segment in found if segment is not None]
        return self._segments[key]

    def _segment(self, cut: tuple[tuple[Node, ...], ...]) -> _Segment | None:
        sizes = self.sizes if len(cut) > 1 else [self.items]
        best: _Segment | None = None
        for size in reversed(sizes):
            found = self._with_chunks(cut, size, float("inf") if best is None else best.plan.seconds)
            best = found if found is not None else best
        return best

    def _with_chunks(self, cut: tuple[tuple[Node, ...], ...], size: int, below: float) -> _Segment | None:
        """With chunks of this size; None if that is not faster than `below`."""
        chunks = self.items // size
        costs = [self.costs.stage(group, size, chunks) for group in cut]
        timed = [self.costs.in_turn(group) for group in costs]
        if chunks * max(float(seconds[-1]) for seconds, _ in timed) >= below:
            return None  # not even if each stage had all devices
        paths, ahead = _paths(self.graph, cut)
        transfers = [self._transfer(cut, i, size) for i in range(len(cut))]
        placed = [i for i, group in enumerate(cut) if any(not part.cpu_ranks for node in group for part in node.parts)]
        others = {i: np.asarray(timed[i][0][0] + transfers[i]) for i in range(len(cut)) if i not in placed}

        def cost(stages: list[Array]) -> Array:
            by_stage = {**dict(zip(placed, stages, strict=True)), **others}
            return np.max(np.stack([_one_path([by_stage[i] for i in path], chunks) for path in paths]), axis=0)

        shares: tuple[int, ...] = ()
        seconds = float(cost([])) if not placed else 0.0
        if placed:
            times = [timed[i][0] + transfers[i] for i in placed]
            shares, seconds = split(times, self.costs.devices, cost)
        if not seconds < below:
            return None
        given = dict(zip(placed, shares, strict=True))
        stages, first = [], 0
        for i, group in enumerate(costs):
            n = given.get(i, 0)
            stages.append(_stage(group, n, first, float(timed[i][0][n] + transfers[i]), float(timed[i][1][n])))
            first += n
        load_s = max(
            0.0 if stage.switch_s else sum(cost.switch_s for cost in group)
            for stage, group in zip(stages, costs, strict=True)
        )
        return _Segment(SegmentPlan(tuple(stages), size, seconds, ahead), cut, load_s)

    def _transfer(self, cut: Sequence[Sequence[Node]], index: int, size: int) -> float:
        """What a stage waits for what the stages before it made of one chunk; it is theirs who need it."""
        before = [node for group in cut[:index] for node in group]
        return sum(self.graph.transfer_s(before, node, size) for node in cut[index])

    def _joined(self, segments: tuple[_Segment, ...]) -> Plan:
        seconds, switch_s, before = 0.0, 0.0, list[Node]()
        for segment in segments:
            seconds += segment.plan.seconds
            mine = [node for group in segment.nodes for node in group]
            if len(segment.nodes) > 1 or any(len(s.nodes) > 1 for s in segments):  # not all on the same devices
                seconds += sum(self.graph.transfer_s(before, node, self.items) for node in mine)
            before += mine
        resident = len(segments) == 1 or self._all_resident(segments)
        if not resident:
            switch_s = sum(segment.load_s for segment in segments)
        plans = tuple(segment.plan for segment in segments)
        return Plan(plans, self.items, self.costs.devices, seconds + switch_s, switch_s, resident)

    def _all_resident(self, segments: tuple[_Segment, ...]) -> bool:
        """Whether the fullest device of each segment has room for the states of all others."""
        resident, work = 0.0, 0.0
        for segment in segments:
            held = []
            for group, stage in zip(segment.nodes, segment.plan.stages, strict=True):
                costs = self.costs.stage(group, segment.plan.chunk, self.items // segment.plan.chunk)
                if stage.switch_s:
                    return False
                held.append(sum(float(cost.resident[stage.devices]) for cost in costs))
                work = max(work, *(float(c.peak[stage.devices] - c.resident[stage.devices]) for c in costs))
            resident += max(held)
        return resident + work <= self.costs.device_bytes


def _one_path(stages: list[Array], chunks: int) -> Array:
    total = sum(stages[1:], stages[0])
    longest = stages[0]
    for stage in stages[1:]:
        longest = np.maximum(longest, stage)
    return total + (chunks - 1) * longest if chunks > 1 else total  # 0 times infinity is no number


def _paths(graph: Graph, cut: Sequence[Sequence[Node]]) -> tuple[list[tuple[int, ...]], bool]:
    """From every stage that needs no other to every stage that no other needs, cut where a stage works ahead of the
    next; and whether one does."""
    follows = {
        i: [j for j in range(i + 1, len(cut)) if any(graph.feeds(a, b) for a in cut[i] for b in cut[j])]
        for i in range(len(cut))
    }
    needed = {j for after in follows.values() for j in after}

    def onward(stage: int) -> list[tuple[int, ...]]:
        rest = [path for j in follows[stage] for path in onward(j)]
        return [(stage, *path) for path in rest] or [(stage,)]

    whole = [path for i in range(len(cut)) if i not in needed for path in onward(i)]
    parts: list[tuple[int, ...]] = []
    for path in whole:
        begin = 0
        for at in range(1, len(path)):
            if not any(graph.waits(a, b) for a in cut[path[at - 1]] for b in cut[path[at]]):
                parts.append(path[begin:at])
                begin = at
        parts.append(path[begin:])
    return parts, len(parts) > len(whole)


def _stage(costs: Sequence[Cost], devices: int, first: int, seconds: float, switch_s: float) -> StagePlan:
    parts: list[PartPlan] = []
    loops = []
    for cost in costs:
        placed, loop = cost.at(devices, first)
        parts += placed
        loops += [loop] if loop is not None else []
    return StagePlan(tuple(parts), first, devices, seconds, switch_s, tuple(loops))


def _chunk_sizes(graph: Graph, items: int) -> list[int]:
    """Sizes that divide the batch and that every part takes, at most `MOST_CHUNK_SIZES` of them, small to large."""
    multiple = lcm(*(part.chunk for part in graph.components.values()))
    if items < 1 or items % multiple:
        raise SpecError(f"a batch of {items} items is not a multiple of {multiple}, which the parts' chunks ask for")
    sizes = [d for d in range(multiple, items + 1, multiple) if items % d == 0 and items // d <= MOST_CHUNKS]
    while len(sizes) > MOST_CHUNK_SIZES:
        sizes = sorted({*sizes[1::2], items})
    return sizes


def _guesses(graph: Graph, plan: Plan) -> tuple[str, ...]:
    found = []
    for segment in plan.segments:
        for stage in segment.stages:
            for part in stage.parts:
                why = graph.components[part.name].table.unknown(part.ranks, segment.chunk)
                found += [f"{part.name}: {why}"] if why else []
    return tuple(found)


def _why_none(graph: Graph, items: int, devices: int, device_bytes: float, mode: Mode | None) -> str:
    costs = Costs(devices, device_bytes)
    for part in graph.components.values():
        if not np.isfinite(costs.part(part, items).seconds[-1]):
            ranks = [*range(1, devices // part.unit + 1)]
            if ranks and part.widths and min(part.widths) > ranks[-1]:
                return (
                    f"{part.name} runs on {min(part.widths)} rank(s) or more, and {devices} device(s) hold {ranks[-1]}"
                )
            if not ranks:
                needs = f"{part.name} needs {part.unit} device(s) for one rank"
                return f"{needs}, and there are {devices}: give it more devices"
            least = float(np.min(part.table.peak_bytes(ranks, items)))
            need = f"needs {least:.3g} bytes a device even on all"
            return f"{part.name} {need} of {devices} device(s) with {device_bytes:.3g} bytes each: give it more devices"
    what = f"{mode} plan" if mode else "plan"
    return f"there is no {what} for {len(graph.components)} part(s) on {devices} device(s)"
