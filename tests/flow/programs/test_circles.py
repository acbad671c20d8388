"""Circles of parts whose workers are plain objects."""

import threading
from typing import Any

import pytest

from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.running import Running
from rlix.flow.programs.segment import SegmentRun
from rlix.flow.programs.wiring import Circle, Part
from rlix.protocol.errors import WaitTimeoutError, WorkerError
from tests.flow.programs.pretended import ITEMS, POOL, Joins, chunked, profile

pytestmark = pytest.mark.usefixtures("no_ray")


class Walks(FlowWorker):
    """A policy that adds, or a world that doubles; what happened is in the item."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def go(self, items: list[tuple[int, str]]) -> list[tuple[int, str]]:
        return [(n + 1 if self.kind == "a" else 2 * n, said + self.kind) for n, said in items]

    def short(self, items: list[tuple[int, str]]) -> list[tuple[int, str]]:
        return items[len(items) // 2 :]


def circular(**more: Any) -> Flow:
    parts = [
        Part("begin", Joins, "pairs"),
        Part("act", Walks, "go", ("begin",), kwargs={"kind": "a"}),
        Part("world", Walks, "go", ("act",), kwargs={"kind": "w"}, **more),
        Part("both", Joins, "pairs", ("begin", "world")),
    ]
    return Flow("sums", parts, ITEMS, circles=[Circle(("act", "world"), 3)])


@pytest.mark.parametrize("cpu_ranks", [0, 2])
def test_a_circle_goes_round_as_often_as_it_says(cpu_ranks: int) -> None:
    known = profile(begin=0.1, act=0.2, world=0.2, both=0.1)
    with Running(circular(cpu_ranks=cpu_ranks), POOL, plan="auto", profile=known) as running:
        (loop,) = [loop for segment in running.plan.segments for stage in segment.stages for loop in stage.loops]
        assert (loop.parts, loop.rounds, loop.slices > 1) == (("act", "world"), 3, cpu_ranks > 0)
        begin = [(n, "") for n in range(ITEMS)]
        expected = [((n, ""), (8 * n + 14, "awawaw")) for n in range(ITEMS)]
        for chunk in (None, 5, 1):  # fives are not cut in slices
            if chunk is not None:
                running.switch(chunked(running.plan, chunk))
            assert running.step(begin) == expected


class Uneven(FlowWorker):
    """A policy that loses an item of all slices but the first, whose world waits until that is known."""

    known = threading.Event()

    def act(self, items: list[int]) -> list[int]:
        return items[items[0] > 0 :]

    def world(self, items: list[int]) -> list[int]:
        if not self.known.wait(300):
            raise WaitTimeoutError("nobody stopped the first slice")
        return items


def test_a_slice_that_fails_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: SegmentRun, error: BaseException) -> None:
        stop(run, error)
        Uneven.known.set()

    stop = SegmentRun.fail
    monkeypatch.setattr(SegmentRun, "fail", fail)
    parts = [Part("act", Uneven, "act", most=1), Part("world", Uneven, "world", ("act",), cpu_ranks=2)]
    flow = Flow("sums", parts, ITEMS, circles=[Circle(("act", "world"), 3)])
    with Running(flow, POOL, plan="auto", profile=profile(act=0.2, world=0.2)) as running:
        (loop,) = running.plan.segments[0].stages[0].loops
        assert loop.slices > 1
        with pytest.raises(WorkerError, match=r"act made \d items of \d"):
            running.step(list(range(ITEMS)))
