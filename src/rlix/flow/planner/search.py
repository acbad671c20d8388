"""The fastest way to run a flow: over all cuts of its graph, all splits of the devices, and the sizes of chunks.

A plan is a sequence of segments, one after the other on all devices; in a segment, stages work beside each other on
chunks of the batch; in a stage, parts take turns for every chunk. A segment of stages with times t_i for each of m
chunks takes, on the longest of its paths, the sum of t_i (to fill and drain) and m-1 times the largest t_i. Where a
stage may work ahead of the next one, the path is cut there: neither waits for the other within a step.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import lcm

import numpy as np

from rlix.flow.planner.bounds import Bounds
from rlix.flow.planner.costs import Cost, Costs
from rlix.flow.planner.graph import Graph, Node, ordered_partitions
from rlix.flow.planner.plan import SLACK, Mode, PartPlan, Plan, Planned, SegmentPlan, StagePlan
from rlix.flow.planner.split import split
from rlix.flow.planner.tables import Array
from rlix.protocol.errors import SpecError

MOST_CHUNK_SIZES = 24
MOST_CHUNKS = 256
KEPT = 6  # runners-up
INFINITE = float("inf")


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

    `device_bytes`: left out, more than anything needs. `mode`: the fastest of this mode, whatever others would take.
    Takes milliseconds for three parts.

    Of plans that are at most `slack` slower than the fastest, the one with the fewest stages: tables are no better.

    Raises:
        SpecError: there is no plan: the devices are too few or too small, or the batch cannot be divided.
    """
    search = _Search(graph, items, Costs(devices, device_bytes), _Wanted(mode, slack))
    search.run()
    plans = sorted(search.found.plans, key=lambda plan: (plan.seconds, len(plan.segments), plan.shape))
    eligible = [plan for plan in plans if mode is None or plan.mode is mode]
    if not eligible:
        raise SpecError(_why_none(graph, items, devices, device_bytes, mode))
    close = [plan for plan in eligible if plan.seconds <= eligible[0].seconds * (1 + slack)]
    best = min(close, key=lambda plan: plan.extra_stages)
    plans.remove(best)
    fastest = {plan.mode: plan for plan in reversed(plans)}.values()  # of each mode
    others = plans[:KEPT] + [plan for plan in fastest if plan not in plans[:KEPT]]
    return Planned(best, tuple(others), _guesses(graph, best))


@dataclass(frozen=True, slots=True)
class _Segment:
    plan: SegmentPlan
    nodes: tuple[tuple[Node, ...], ...]
    load_s: float  # to bring its states on and off once; stages that switch for every chunk have it in their time


class _Wanted:
    """The plans found, and which times still matter: of the fastest, of runners-up, and of the fastest of each mode."""

    def __init__(self, mode: Mode | None, slack: float) -> None:
        self.plans: list[Plan] = []
        self._mode, self._slack = mode, slack
        self._seconds: list[float] = []
        self._least: dict[tuple[Mode, int], float] = {}
        self._below: dict[tuple[Mode, int], float] = {}

    def add(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._below.clear()
        insort(self._seconds, plan.seconds)
        key = plan.mode, plan.extra_stages
        self._least[key] = min(plan.seconds, self._least.get(key, INFINITE))

    def below(self, mode: Mode, extra_stages: int) -> float:
        """Whatever takes as long as this, or longer, is not wanted: of this mode, of so many stages or more."""
        key = mode, extra_stages
        if key not in self._below:
            self._below[key] = self._look(mode, extra_stages)
        return self._below[key]

    def _look(self, mode: Mode, extra_stages: int) -> float:
        of_mode = min((s for (m, _), s in self._least.items() if m is mode), default=INFINITE)
        runner_up = self._seconds[KEPT] if len(self._seconds) > KEPT else INFINITE
        wanted = [(stages, s) for (m, stages), s in self._least.items() if self._mode in (None, m)]
        close = min((s for _, s in wanted), default=INFINITE) * (1 + self._slack)
        fewer = min((s for stages, s in wanted if stages <= extra_stages), default=INFINITE)
        return max(of_mode, runner_up, min(close, fewer))


class _Search:
    """Looks at every shape of a plan whose bound does not say that nobody wants it, the most promising first."""

    def __init__(self, graph: Graph, items: int, costs: Costs, found: _Wanted) -> None:
        self.graph, self.items, self.costs, self.found = graph, items, costs, found
        self.bounds = Bounds(graph, items, _chunk_sizes(graph, items), costs)
        self._ways: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        self._bounds_of: dict[int, float] = {}
        self._known: dict[tuple[int, ...], tuple[float, _Segment | None]] = {}

    def run(self) -> None:
        cuts = [(sum(map(self._least, cut)), cut) for cut in ordered_partitions(self.graph, self._every)]
        for least, cut in sorted(cuts):
            if least < INFINITE:
                self._try(cut, least, [], 0)

    @property
    def _every(self) -> int:
        return (1 << len(self.graph.nodes)) - 1

    def _least(self, nodes: int) -> float:
        """Of these nodes as one segment, however they are grouped."""
        if nodes not in self._bounds_of:
            alone = [1 << i for i in range(nodes.bit_length()) if nodes >> i & 1]
            self._bounds_of[nodes] = self.bounds.by_work(alone)
        return self._bounds_of[nodes]

    def _try(self, cut: tuple[int, ...], least: float, chosen: list[_Segment], extra: int) -> None:
        """Every plan of these segments, of which the first are `chosen`, that takes `least` or more."""
        if len(chosen) == len(cut):
            self.found.add(self._joined(tuple(chosen)))
            return
        nodes = cut[len(chosen)]
        more = sum(1 for later in cut[len(chosen) + 1 :] if later & (later - 1))  # those have two stages or more
        others = least - self._least(nodes)
        for at_least, groups in self._groupings(nodes):
            stages = extra + len(groups) - 1
            mode = self._mode(cut, groups)
            below = self.found.below(mode, stages + more) - others
            if at_least >= below:
                if len(cut) > 1 and at_least >= self.found.below(mode, 0) - others:
                    break  # nor is what comes after it, which is of the same mode
                continue
            segment = self._segment(groups, below)
            if segment is not None:
                self._try(cut, others + segment.plan.seconds, [*chosen, segment], stages)

    def _mode(self, cut: Sequence[int], groups: Sequence[int]) -> Mode:
        if len(cut) == len(self.graph.nodes):
            return Mode.COLLOCATED
        return Mode.DISAGGREGATED if len(groups) == len(self.graph.nodes) else Mode.HYBRID

    def _groupings(self, nodes: int) -> list[tuple[float, tuple[int, ...]]]:
        """Every way in which these nodes are stages of a segment, with its bound, the most promising first."""
        if nodes not in self._ways:
            ways = ordered_partitions(self.graph, nodes)  # all in one stage are segments, unless it is one
            found = [(self.bounds.by_work(way), way) for way in ways if len(way) > 1 or not nodes & (nodes - 1)]
            self._ways[nodes] = sorted(found)
        return self._ways[nodes]

    def _segment(self, groups: tuple[int, ...], below: float) -> _Segment | None:
        """The fastest of these stages; None if that is not faster than `below`."""
        least, best = self._known.get(groups, (0.0, None))
        if best is not None or least >= below:
            return best
        sizes = self.bounds.sizes(sum(groups)) if len(groups) > 1 else [self.items]
        if self.bounds.possible(groups, below):
            for size in reversed(sizes):
                limit = below if best is None else best.plan.seconds
                if self.bounds.possible(groups, limit, size):
                    best = self._with_chunks(groups, size, limit) or best
        self._known[groups] = (below if best is None else best.plan.seconds), best
        return best

    def _with_chunks(self, groups: tuple[int, ...], size: int, below: float) -> _Segment | None:
        """With chunks of this size; None if that is not faster than `below`."""
        chunks, cut = self.items // size, tuple(self.bounds.nodes(group) for group in groups)
        known = [self.bounds.stage(group, size) for group in groups]
        costs, timed = [stage[0] for stage in known], [stage[1:] for stage in known]
        paths, ahead = _paths(self.graph, cut)
        transfers = [self._transfer(cut, i, size) for i in range(len(cut))]
        placed = [i for i, group in enumerate(cut) if any(not part.cpu_ranks for node in group for part in node.parts)]
        others = {i: np.asarray(timed[i][0][0] + transfers[i]) for i in range(len(cut)) if i not in placed}

        def cost(stages: list[Array]) -> Array:
            by_stage = {**dict(zip(placed, stages, strict=True)), **others}
            return np.asarray(reduce(np.maximum, [_one_path([by_stage[i] for i in path], chunks) for path in paths]))

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
            sum(cost.switch_s for cost in group) if stage.stays else 0.0
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
                if not stage.stays:
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
    """Sizes that divide the batch, small to large: those that every part takes, and those that one of them does, for it
    need not be in one segment with the others. At most `MOST_CHUNK_SIZES` of each."""
    chunks = {part.chunk for part in graph.components.values()}
    multiple = lcm(*chunks)
    if items < 1 or items % multiple:
        raise SpecError(f"a batch of {items} items is not a multiple of {multiple}, which the parts' chunks ask for")
    return sorted({size for each in (multiple, *chunks) for size in _multiples(each, items)})


def _multiples(of: int, items: int) -> list[int]:
    sizes = [d for d in range(of, items + 1, of) if items % d == 0 and items // d <= MOST_CHUNKS]
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
