"""Items that stream: to whoever is free, as soon as they are there, and in the same order at the end."""

import heapq
import random
import threading
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.planner import Component, Edge, Graph, Mode, Point, Table, make_plan
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.pieces import Made, Pieces
from rlix.flow.programs.running import Running
from rlix.flow.programs.streams import Claims
from rlix.flow.programs.wiring import Part
from rlix.protocol.errors import WorkerError
from tests.flow.programs.pretended import POOL, profile


@settings(max_examples=50)
@given(st.integers(0, 40), st.integers(1, 7), st.randoms())
def test_every_item_is_taken_once_whatever_is_ready_first(count: int, each: int, rng: random.Random) -> None:
    claims, taken = Claims(0, count, each), list[int]()
    while not claims.over:
        there = {n for n in range(count) if rng.random() < 0.7}
        bounds = claims.take(lambda begin, end: there.issuperset(range(begin, end)))  # noqa: B023
        if bounds is None:
            continue
        assert there.issuperset(range(*bounds)) and bounds[1] - bounds[0] == min(each, count - bounds[0])
        taken += range(*bounds)
    assert sorted(taken) == list(range(count))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), max_size=8), st.randoms(), st.data())
def test_what_was_made_in_any_order_is_cut_as_if_it_were_whole(
    sizes: list[int], rng: random.Random, data: st.DataObject
) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    spans = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    rng.shuffle(spans)
    there = data.draw(st.integers(0, len(spans)))
    made = Made()
    for begin, end in spans[:there]:
        made.put(begin, end, [(list(range(begin, end)), 0, end - begin)])
    known = {n for begin, end in spans[:there] for n in range(begin, end)}
    begin = data.draw(st.integers(0, sum(sizes)))
    end = data.draw(st.integers(begin, sum(sizes)))
    assert made.has(begin, end) is known.issuperset(range(begin, end))
    if made.has(begin, end):
        assert values(made.cut(begin, end)) == list(range(begin, end))
    assert values(made.whole) == sorted(known)


def values(pieces: Pieces) -> list[int]:
    return [value for ref, start, stop in pieces for value in ref[start:stop]]


def test_nobody_waits_for_the_slowest_of_a_chunk() -> None:
    """64 items of lognormal(1.2) seconds on 4 ranks, by arithmetic; what they would take on ranks that never wait is 1.

    A barrier after every 8, of which each rank has two, against ranks that take the next when they are free.
    """

    def barrier(seconds: Sequence[float]) -> float:
        chunks = [seconds[i : i + 8] for i in range(0, 64, 8)]
        return sum(max(sum(chunk[i : i + 2]) for i in range(0, 8, 2)) for chunk in chunks)

    def streamed(seconds: Sequence[float]) -> float:
        claims, free = Claims(0, 64, 1), [0.0] * 4
        while (bounds := claims.take()) is not None:
            heapq.heapreplace(free, free[0] + sum(seconds[slice(*bounds)]))
        return max(free)

    rng, ratios = random.Random(0), list[tuple[float, float]]()
    for _ in range(400):
        seconds = [rng.lognormvariate(0.0, 1.2) for _ in range(64)]
        ideal = sum(seconds) / 4
        ratios.append((barrier(seconds) / ideal, streamed(seconds) / ideal))
    assert fmean(ratio for ratio, _ in ratios) == pytest.approx(2.11, abs=0.03)
    assert fmean(ratio for _, ratio in ratios) == pytest.approx(1.16, abs=0.02)


class Waits(FlowWorker):
    """The first item is held until everything else has happened; what happened is noted."""

    go, said = threading.Event(), list[str]()

    def slow(self, items: list[int]) -> list[int]:
        if 0 in items:
            assert self.go.wait(300)
        self.said.append(f"made {items}")
        return items

    def use(self, items: list[int]) -> list[int]:
        self.said.append(f"used {items}")
        if items == [5]:
            self.go.set()  # all others have gone all the way
        return items


@pytest.mark.usefixtures("no_ray")
def test_a_consumer_has_used_every_other_item_while_the_first_is_being_made() -> None:
    Waits.go.clear()
    Waits.said.clear()
    flow = Flow("sums", [Part("slow", Waits, "slow", each=1), Part("use", Waits, "use", each=1, most=1)], 6)
    known = profile(slow=0.2, use=0.1)
    plan = flow.plan(known, 3, mode=Mode.DISAGGREGATED).best
    assert [part.ranks for part in plan.parts] == [2, 1]
    with Running(flow, POOL[:3], plan=plan, profile=known) as running:
        assert running.step(range(6)) == list(range(6))  # in order, whoever came first
    assert Waits.said[-2:] == ["made [0]", "used [0]"]
    assert len(Waits.said) == 12


class Fails(Waits):
    def fail(self, items: list[int]) -> list[int]:
        if items == [3]:
            raise WorkerError("no such item")
        return items


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("mode", [Mode.COLLOCATED, Mode.DISAGGREGATED])
def test_what_a_rank_raises_in_a_stream_stops_the_others(mode: Mode) -> None:
    flow = Flow("sums", [Part("slow", Fails, "fail", each=1), Part("use", Waits, "use", each=1)], 64)
    Waits.said.clear()
    with Running(flow, POOL, plan=mode, profile=profile(slow=0.2, use=0.1)) as running:
        with pytest.raises(WorkerError, match="no such item"):
            running.step(range(64))
        assert "used [63]" not in Waits.said


def test_a_part_that_streams_is_planned_without_a_wait_for_each_chunk() -> None:
    """Alone on one device it takes 1 s and 1 s an item; in chunks of 2 of 8 that is 4 × 3 s, and as a stream 9 s."""

    def graph(**more: Any) -> Graph:
        table = Table([Point(1, n, 1.0 + n) for n in (1, 8)])
        parts = [Component("a", table, **more), Component("b", Table([Point(1, n, 0.1 * n) for n in (1, 8)]))]
        return Graph(parts, [Edge("a", "b")])

    plan = make_plan(graph(streams=True), 8, 2, mode=Mode.DISAGGREGATED).best
    (segment,) = plan.segments
    assert segment.chunk == 1
    assert plan.seconds == pytest.approx(9.0 + 0.1)  # b is done with the last item
    calls = make_plan(graph(), 8, 2, mode=Mode.DISAGGREGATED).best
    assert calls.seconds == pytest.approx(9.0 + 0.8)  # b waits for all of them


def test_ranks_get_nothing_more_when_a_stream_is_dropped() -> None:
    claims = Claims(0, 8, 2)
    assert claims.take() == (0, 2)
    claims.drop()
    assert claims.over and claims.take() is None
