"""When each part of a plan works on which devices, for pictures of it: pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlix.flow.planner.plan import LoopPlan, PartPlan, Plan, SegmentPlan, StagePlan
from rlix.flow.planner.rounds import rounds_s

_CIRCLE = "⟲"
After = Mapping[str, Collection[str]]
"""The parts whose items of the same step each part gets."""


@dataclass(frozen=True, slots=True)
class Block:
    """Something that takes from `start` to `end` on `devices` devices from number `first`, or none: on the CPU.

    `name`: of the part; with a ⟲, of parts that take turns with others of their circle all the while; "": states and
    items are moved. `chunk`: from 0, where there are several.
    """

    name: str
    first: int
    devices: int
    start: float
    end: float
    chunk: int | None = None


def blocks(plan: Plan, after: After) -> list[Block]:
    """Of one step, from 0 to the plan's seconds.

    Of what moving takes between segments only the sum is known: it is drawn in equal parts before each of them.
    """
    found: list[Block] = []
    moving_s = plan.seconds - sum(segment.seconds for segment in plan.segments)
    before_s = moving_s / len(plan.segments) if moving_s > 1e-9 * plan.seconds else 0.0
    begin = 0.0
    for segment in plan.segments:
        if before_s:
            found += [Block("", s.first, s.used, begin, begin + before_s) for s in segment.stages if s.used]
        found += _of_segment(segment, plan.items // segment.chunk, begin + before_s, after)
        begin += before_s + segment.seconds
    return found


def times(stages: Sequence[StagePlan], chunks: int, after: After) -> Iterator[tuple[int, int, float, float]]:
    """Stage, chunk, and from when to when: it begins one when it has, and all that it comes after have, ended it."""
    names = [{part.name for part in stage.parts} for stage in stages]
    needs = [{before for name in mine for before in after.get(name, ())} for mine in names]
    ended = [0.0] * len(stages)
    for chunk in range(chunks):
        for n, stage in enumerate(stages):
            begin = max([ended[n], *(ended[i] for i in range(n) if names[i] & needs[n])])
            ended[n] = begin + stage.seconds
            yield n, chunk, begin, ended[n]


def work_s(loops: Sequence[LoopPlan], parts: Sequence[PartPlan]) -> float:
    """Seconds of a stage for one chunk, without what moving takes."""
    return sum(seconds for _, seconds in _in_turn(loops, parts))


def _in_turn(loops: Sequence[LoopPlan], parts: Sequence[PartPlan]) -> list[tuple[tuple[PartPlan, ...], float]]:
    """What follows each other: a part, or a circle of several; a circle whose parts take turns has one slice."""
    by_name = {part.name: part for part in parts}
    circles = {name: loop for loop in loops for name in loop.parts}
    found: list[tuple[tuple[PartPlan, ...], float]] = []
    for part in parts:
        loop = circles.get(part.name)
        if loop is None:
            found.append(((part,), part.seconds))
        elif part.name == loop.parts[0]:
            inside = tuple(by_name[name] for name in loop.parts)
            each = [one.seconds for one in inside]
            found.append((inside, float(rounds_s(loop.rounds, loop.slices, sum(each), max(each)))))
    return found


def _of_segment(segment: SegmentPlan, chunks: int, begin: float, after: After) -> Iterator[Block]:
    for n, at, start, end in times(segment.stages, chunks, after):
        chunk = at if chunks > 1 else None
        stage = segment.stages[n]
        now = begin + end - work_s(stage.loops, stage.parts)
        if now > begin + start + 1e-9 * segment.seconds and stage.used:
            yield Block("", stage.first, stage.used, begin + start, now, chunk)
        for parts, seconds in _in_turn(stage.loops, stage.parts):
            places: dict[tuple[int, int], list[str]] = {}
            for part in parts:
                places.setdefault((part.first, part.devices), []).append(part.name)
            for (first, devices), names in places.items():
                name = names[0] if len(parts) == 1 else _CIRCLE.join(names) if names[1:] else f"{_CIRCLE} {names[0]}"
                yield Block(name, first, devices, now, now + seconds, chunk)
            now += seconds


def lanes(devices: int, drawn: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Devices that do the same at all times, as one lane with its numbers; then those that work on the CPU."""
    edges = sorted({0, devices, *(edge for b in drawn if b.devices for edge in (b.first, b.first + b.devices))})
    found = []
    for first, end in pairwise(edges):
        on = [b for b in drawn if b.first <= first < b.first + b.devices]
        found.append((f"{first}" if end == first + 1 else f"{first}–{end - 1}", on))
    cpu = dict.fromkeys(block.name for block in drawn if not block.devices)
    return found + [("CPU", [b for b in drawn if not b.devices and b.name == name]) for name in cpu]
