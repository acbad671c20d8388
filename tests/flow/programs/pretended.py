"""A flow's workers as plain objects in this process, for tests that need no Ray."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from rlix.flow.parts.flow_worker import FlowWorker, apart
from rlix.flow.planner import Plan, Point, SegmentPlan
from rlix.flow.profiler.profile import PartProfile, Profile
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.pieces import Pieces
from rlix.flow.programs.wiring import Part
from rlix.protocol.messages import Device, DeviceKind

ITEMS, DEVICES = 16, 4
POOL = [Device(i, "here", "::1", i, DeviceKind.CPU) for i in range(DEVICES)]


class Adds(FlowWorker):
    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def add(self, items: list[int]) -> list[int]:
        self.calls += 1
        return [item + self.number for item in items]

    def short(self, items: list[int]) -> list[int]:
        return items[1:]

    def memory(self) -> tuple[float, float]:
        return 1.0, 2.0

    def room(self) -> float:
        return 80.0


class Keeps(Adds):
    def save(self) -> int:
        return self.calls

    def restore(self, state: int) -> None:
        self.calls = state


class Joins(FlowWorker):
    def pairs(self, pairs: list[Any]) -> list[Any]:
        return pairs

    def join(self, pairs: list[tuple[int, int]]) -> list[int]:
        return [1000 * first + second for first, second in pairs]


class Group:
    """As `rlix.flow.parts.part_group.PartGroup`, of objects in this process."""

    def __init__(self, part: Part, ranks: int, first: int, name: str) -> None:
        self.name, self.first = name, first
        self.members = [part.worker(**part.kwargs) for _ in range(ranks)]
        self.world_size, self.processes = ranks, dict[int, Any]()
        self.lease = None
        self.logged: list[Any] = []
        self.late: list[int] = []
        self.lost: list[int] = []

    def ask(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        called = self.members if ranks is None else [self.members[rank] for rank in ranks]
        return [getattr(member, method)(*args) for member in called]

    def part(self, method: str, inputs: Sequence[Sequence[Pieces]], ranks: Any = None) -> tuple[list[Any], Any]:
        called = self.members if ranks is None else [self.members[rank] for rank in ranks]
        shares = zip(called, map(apart, inputs), strict=True)
        made = [member._rlix_part(method, bounds, 0, *ray.get(given)) for member, (bounds, given) in shares]
        return [items for items, _ in made], [told for _, told in made]

    def counts(self, call: Any) -> list[int]:
        self.logged += [logged for _, logged in call]
        return [count for count, _ in call]

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def end(self) -> None: ...

    def end_late(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None: ...


def flow(**first: Any) -> Flow:
    parts = [
        Part("ones", Keeps, "add", kwargs={"number": 1}, **{"chunk": 1, **first}),
        Part("tens", Keeps, "add", ("ones",), kwargs={"number": 10}, chunk=1),
        Part("more", Keeps, "add", ("tens",), kwargs={"number": 100}, chunk=1),
    ]
    return Flow("sums", parts, ITEMS)


def profile(**each: float) -> Profile:
    parts = {
        name: PartProfile(tuple(Point(w, w * load, 0.01 + each[name] * load) for w in (1, 4) for load in (1, 4, 16)))
        for name in each
    }
    return Profile("sums", "here", parts)


def chunked(plan: Plan, items: int) -> Plan:
    """The same plan, whose stages hand on so many items at a time."""

    def longer(segment: SegmentPlan) -> SegmentPlan:
        times = items / segment.chunk
        stages = tuple(replace(stage, seconds=times * stage.seconds) for stage in segment.stages)
        return replace(segment, chunk=items, stages=stages)

    return replace(plan, segments=tuple(map(longer, plan.segments)))
