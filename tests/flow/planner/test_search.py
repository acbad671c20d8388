"""Plans: hand-computed ones, all of small flows against an exhaustive oracle, and what large ones promise."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.flow.planner import Component, Edge, Graph, Mode, Plan, Planned, Point, Table, make_plan
from rlix.flow.planner.costs import Costs
from rlix.flow.planner.graph import ordered_partitions
from rlix.flow.planner.rounds import rounds_s
from rlix.flow.planner.search import INFINITE, _Search, _Wanted
from rlix.flow.planner.split import split
from rlix.protocol.errors import SpecError
from tests.flow.planner.oracle import fastest


def part(name: str, fixed: float, each: float, *, held: float = 0.0, scales: bool = True, **kwargs: float) -> Component:
    """Seconds: `fixed` and `each` an item of the fullest rank; one that does not scale is as slow on any width."""
    loads = (1, 2, 4, 8, 64)
    points = [Point(1, n, fixed + each * n, held, held) for n in loads]
    if not scales:
        points += [Point(w, n * w, fixed + each * n * w, held, held) for w in (2, 4, 8) for n in loads]
    return Component(name, Table(points), **kwargs)  # type: ignore[arg-type]


def chain(*parts: Component, **edge: float) -> Graph:
    edges = [Edge(a.name, b.name, **edge) for a, b in pairwise(parts)]  # type: ignore[arg-type]
    return Graph(parts, edges)


def test_parts_that_scale_and_fit_take_turns() -> None:
    planned = make_plan(chain(part("a", 0, 1), part("b", 0, 1)), 8, 4)
    assert planned.best.mode is Mode.COLLOCATED
    assert planned.best.seconds == pytest.approx(4.0)  # 8 items on 4 ranks, twice
    assert planned.best.shape == "a on 4 → b on 4"
    assert planned.best.resident


def test_switching_that_costs_more_than_filling_a_pipeline_puts_them_apart() -> None:
    a, b = (part(n, 0, 1, held=10, load_s=2, offload_s=2) for n in "ab")
    planned = make_plan(chain(a, b), 8, 4, device_bytes=15)
    assert planned.best.mode is Mode.DISAGGREGATED
    assert planned.best.shape == "(a on 2 | b on 2, by 2 of 8)"
    assert planned.best.seconds == pytest.approx(1 + 4 * 1)  # chunks of 2 on 2 ranks take 1 s; 4 of them, and to fill
    collocated = planned.of(Mode.COLLOCATED)
    assert collocated is not None
    assert (collocated.seconds, collocated.switch_s) == (pytest.approx(4 + 8), 8)
    assert "runner-up" in planned.explain()
    assert "8.000 s  loading and offloading" in collocated.explain()


def test_a_part_that_does_not_scale_gets_few_devices_beside_the_others() -> None:
    slow, wide, last = part("slow", 0, 0.2, scales=False), part("wide", 0, 1.4), part("last", 4, 0.5)
    planned = make_plan(chain(slow, wide, last), 64, 8)
    assert planned.best.mode is Mode.HYBRID  # slow beside wide, in chunks; then last, which is bad at chunks
    assert [len(segment.stages) for segment in planned.best.segments] == [2, 1]
    for mode in (Mode.COLLOCATED, Mode.DISAGGREGATED):
        fixed = planned.of(mode)
        assert fixed is not None
        assert fixed.seconds > planned.best.seconds * 1.1
    whole = make_plan(chain(slow, wide, replace(last, chunk=64)), 64, 8).best  # as what learns: it is apart anyway
    assert (whole.shape, whole.seconds) == (planned.best.shape, planned.best.seconds)
    collocated = make_plan(chain(slow, wide, last), 64, 8, mode=Mode.COLLOCATED).best
    assert collocated.seconds == pytest.approx(12.8 + 11.2 + 8)


def test_working_a_step_ahead_pays_where_the_edge_allows_it() -> None:
    make, score, learn = (part(n, 0, 1, chunk=8) for n in ("make", "score", "learn"))
    inner = Edge("score", "learn")
    in_turn = make_plan(Graph([make, score, learn], [Edge("make", "score"), inner]), 8, 4)
    assert in_turn.best.seconds == pytest.approx(3 * 2)
    slow = part("make", 0, 3, scales=False, chunk=8)  # 24 s on any width: the others' 4 s hide behind it
    ahead = make_plan(Graph([slow, score, learn], [Edge("make", "score", ahead=True), inner]), 8, 5)
    assert ahead.best.shape == "(make on 1 | score+learn on 4, a step ahead)"
    assert (ahead.best.seconds, ahead.best.mode) == (pytest.approx(24), Mode.HYBRID)
    apart = ahead.of(Mode.DISAGGREGATED)
    assert apart is not None
    assert apart.seconds == pytest.approx(24)
    assert make_plan(Graph([slow, score, learn], [Edge("make", "score"), inner]), 8, 5).best.seconds > 27


def test_a_part_runs_on_the_widths_it_can() -> None:
    narrow = part("a", 0, 1, widths=(1, 3))
    best = make_plan(Graph([narrow]), 12, 4).best
    assert ([p.ranks for p in best.parts], best.shape) == ([3], "a on 3")
    with pytest.raises(SpecError, match=r"a runs on 8 rank\(s\) or more, and 4 device\(s\) hold 4"):
        make_plan(Graph([part("a", 0, 1, widths=(8,))]), 8, 4)


def test_a_simulator_on_the_cpu_takes_no_devices() -> None:
    sim = part("sim", 1, 0, cpu_ranks=1)
    planned = make_plan(chain(sim, part("b", 0, 1)), 8, 2)
    assert [(p.name, p.devices) for p in planned.best.parts] == [("sim", 0), ("b", 2)]
    assert planned.best.seconds == pytest.approx(1 + 4)
    assert make_plan(Graph([sim]), 8, 2).best.seconds == pytest.approx(1)


def test_a_simulator_that_nobody_waits_for_is_beside_whatever_works() -> None:
    planned = make_plan(Graph([part("sim", 1, 0, cpu_ranks=1), part("b", 0, 1)]), 8, 2)
    assert planned.best.seconds == pytest.approx(4)  # and the simulator 1, meanwhile
    assert planned.best.shape == "(sim on the CPU | b on 2, in turn)"


def test_a_circle_beside_nobody_is_apart_and_one_in_turn_with_another_is_not() -> None:
    a, b, c = (part(n, 0, 1, scales=False) for n in "abc")
    circle = [Edge("a", "b"), Edge("b", "a", rounds=2), Edge("b", "c")]
    planned = make_plan(Graph([a, b, c, part("d", 0, 1)], [*circle, Edge("c", "d")]), 8, 4)
    modes = {plan.shape.split(",")[0]: plan.mode for plan in (planned.best, *planned.others)}
    assert {mode for shape, mode in modes.items() if "⟲b+" in shape or "+d" in shape} <= {Mode.HYBRID}
    apart = planned.of(Mode.DISAGGREGATED)
    assert apart is not None
    assert [len(stage.parts) for stage in apart.segments[0].stages] == [2, 1, 1]


def test_a_circle_is_planned_as_one_part() -> None:
    sim, policy = part("sim", 0, 1, cpu_ranks=1), part("policy", 0, 1)
    edges = [Edge("sim", "policy"), Edge("policy", "sim", rounds=10)]
    planned = make_plan(Graph([sim, policy], edges), 8, 1)
    (stage,) = planned.best.segments[0].stages
    (loop,) = stage.loops
    assert (loop.rounds, loop.slices, loop.shared) == (10, 4, False)
    assert planned.best.seconds == pytest.approx(10 * 8 + 2)  # both always busy, once the first quarter is through
    both = Graph([part("a", 0, 1, held=6, load_s=1), part("b", 0, 1, held=6, load_s=1)], edges=[
        Edge("a", "b"), Edge("b", "a", rounds=2)])  # fmt: skip
    assert make_plan(both, 4, 1, device_bytes=20).best.seconds == pytest.approx(2 * 8)
    assert make_plan(both, 4, 1, device_bytes=10).best.seconds == pytest.approx(2 * (8 + 2))
    assert make_plan(both, 4, 2, device_bytes=10).best.seconds == pytest.approx(2 * 4 + 1)  # b begins a second later
    with pytest.raises(SpecError, match="needs `rounds`"):
        Graph([sim, policy], [Edge("sim", "policy"), Edge("policy", "sim")])


def test_a_circle_whose_states_take_turns_leaves_no_state_there() -> None:
    """Both states come and go in each of its two rounds, and the next part's with the segment."""
    a, b = (part(n, 0, 1, held=6, load_s=1) for n in "ab")
    circle = [Edge("a", "b"), Edge("b", "a", rounds=2), Edge("b", "c")]
    graph = Graph([a, b, part("c", 0, 1, held=3, load_s=1)], circle)
    plan = make_plan(graph, 4, 1, device_bytes=10, mode=Mode.COLLOCATED).best
    assert (plan.resident, plan.switch_s) == (False, 1)
    assert plan.seconds == pytest.approx(2 * (8 + 2) + 4 + 1)
    beside = make_plan(graph, 4, 1, device_bytes=20, mode=Mode.COLLOCATED).best
    assert (beside.resident, beside.seconds) == (True, pytest.approx(2 * 8 + 4))


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.floats(0, 10), min_size=1, max_size=4))
def test_a_circle_takes_what_its_slices_take_one_after_the_other(rounds: int, slices: int, parts: list[float]) -> None:
    """Played through: each part takes the slices in their order, and each slice the parts."""
    slice_at, part_free = [0.0] * slices, [0.0] * len(parts)
    for _ in range(rounds):
        for i, seconds in enumerate(parts):
            for n in range(slices):
                slice_at[n] = part_free[i] = max(slice_at[n], part_free[i]) + seconds
    assert rounds_s(rounds, slices, sum(parts), max(parts)) == pytest.approx(max(slice_at))
    assert rounds_s(rounds, slices, INFINITE, INFINITE) == INFINITE  # and not no number


def test_what_cannot_be_planned_says_why() -> None:
    with pytest.raises(SpecError, match=r"b needs 20 bytes a device even on all of 2 device\(s\) with 10 bytes"):
        make_plan(chain(part("a", 0, 1), part("b", 0, 1, held=20)), 8, 2, device_bytes=10)
    with pytest.raises(SpecError, match=r"b needs 4 device\(s\) for one rank, and there are 2: give it more devices"):
        make_plan(chain(part("a", 0, 1), part("b", 0, 1, unit=4)), 8, 2)
    with pytest.raises(SpecError, match="not a multiple of 3"):
        make_plan(chain(part("a", 0, 1, chunk=3), part("b", 0, 1)), 8, 2)
    for wrong in (float("nan"), -1.0, float("inf")):
        with pytest.raises(SpecError, match="a: load_s and offload_s are seconds, from 0 on"):
            part("a", 0, 1, load_s=wrong)
        with pytest.raises(SpecError, match="a → b: latency_s and item_s are seconds, from 0 on"):
            Edge("a", "b", wrong)
        with pytest.raises(SpecError, match="not a measurement"):
            Table([Point(1, 1, 1.0, wrong)])
    with pytest.raises(SpecError, match="an edge names 'c'"):
        Graph([part("a", 0, 1)], [Edge("a", "c")])
    assert make_plan(chain(part("a", 0, 1)), 200, 2).guesses == ("a: width 2 is outside the measured 1–1",)


def test_an_explanation_says_why_a_faster_plan_is_not_the_one() -> None:
    graph = chain(part("a", 0, 1), part("b", 0, 1))
    assert "\nrunner-up, 1.12 times as long:\ndisaggregated: " in make_plan(graph, 8, 2).explain()
    apart = make_plan(graph, 8, 2, mode=Mode.DISAGGREGATED)
    assert "8 chunks of 1: a 1.000 s on device 0, b 1.000 s on device 1\n" in apart.explain()
    assert "\nfaster, but not disaggregated: 0.89 times as long:\ncollocated: " in apart.explain()
    near = replace(apart.best, seconds=apart.best.seconds * 0.995)
    assert "\nas fast within 1 %, in more stages:\n" in Planned(apart.best, (near,)).explain()


@st.composite
def flows(draw: st.DrawFn) -> tuple[list[Component], list[Edge], int, int, float]:
    names = "abc"[: draw(st.integers(1, 3))]
    items = draw(st.sampled_from([1, 2, 3, 4]))
    tenths = st.integers(0, 30).map(lambda n: n / 10)
    parts = [
        part(
            name,
            draw(tenths) + 0.1,
            draw(tenths),
            held=draw(st.sampled_from([0.0, 3.0, 6.0])),
            scales=draw(st.booleans()),
            unit=draw(st.sampled_from([1, 1, 2])),
            load_s=draw(tenths),
            widths=draw(st.sampled_from([(), (), (1,), (1, 2, 4)])),
            chunk=draw(st.sampled_from([1, 1, items])),
        )
        for name in names
    ]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    used = [pair for pair in pairs if draw(st.booleans()) or pair[0] == chr(ord(pair[1]) - 1)]
    edges = [Edge(a, b, draw(tenths) / 10, draw(tenths) / 10, ahead=draw(st.booleans())) for a, b in used]
    return parts, edges, items, draw(st.integers(2, 4)), draw(st.sampled_from([6.0, 9.0]))


@settings(max_examples=40)
@given(flows())
def test_no_plan_of_a_small_flow_is_faster(flow: tuple[list[Component], list[Edge], int, int, float]) -> None:
    parts, edges, items, devices, room = flow
    planned = make_plan(Graph(parts, edges), items, devices, device_bytes=room, slack=0.0)
    assert planned.best.seconds == pytest.approx(fastest(parts, edges, items, devices, room))
    for plan in (planned.best, *planned.others):
        check(plan)


@settings(max_examples=40)
@given(flows())
def test_no_bound_is_above_what_it_bounds(flow: tuple[list[Component], list[Edge], int, int, float]) -> None:
    """Also of parts that are too large for one device, or too large for a whole batch."""
    parts, edges, items, devices, room = flow
    graph = Graph(parts, edges)
    search = _Search(graph, items, Costs(devices, room), _Wanted(None, 0.0))
    for nodes in range(1, 2 ** len(parts)):
        for by_work, groups in search._groupings(nodes):
            segment = search._segment(groups, INFINITE)
            if segment is not None:
                seconds = segment.plan.seconds * (1 + 1e-9)
                assert search._least(nodes) <= seconds and by_work <= seconds
                assert search.bounds.possible(groups, seconds)
                assert search.bounds.possible(groups, seconds, segment.plan.chunk)


@given(st.integers(1, 5), st.data())
def test_every_order_of_groups_is_found_once(count: int, data: st.DataObject) -> None:
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if data.draw(st.booleans())]
    graph = Graph([part(str(n), 1, 1) for n in range(count)], [Edge(str(a), str(b)) for a, b in pairs])
    found = [frozenset(cut) for cut in ordered_partitions(graph, 2**count - 1)]
    place = [p for p in product(range(count), repeat=count) if sorted({*p}) == list(range(len({*p})))]
    allowed = {
        frozenset(sum(1 << n for n in range(count) if p[n] == group) for group in {*p})
        for p in place
        if all(p[a] <= p[b] for a, b in pairs)
    }
    assert len(found) == len(set(found)) and set(found) == allowed


def check(plan: Plan) -> None:
    for segment in plan.segments:
        assert plan.items % segment.chunk == 0
        used: set[int] = set()
        for stage in segment.stages:
            devices = set(range(stage.first, stage.first + stage.devices))
            assert not used & devices
            used |= devices
            for p in stage.parts:
                assert set(range(p.first, p.first + p.devices)) <= devices
        assert max(used) < plan.devices


@given(st.lists(st.lists(st.floats(0.01, 10), min_size=12, max_size=12), min_size=1, max_size=3))
def test_a_split_of_few_devices_is_the_cheapest(rows: list[list[float]]) -> None:
    times = [np.minimum.accumulate(np.array([np.inf, *row])) for row in rows]
    shares, least = split(times, 12, lambda stages: sum(stages) + 3 * np.max(np.stack(stages), axis=0))
    splits = (s for s in product(range(1, 13), repeat=len(rows)) if sum(s) == 12)
    costs = [
        sum(t[n] for t, n in zip(times, s, strict=True)) + 3 * max(t[n] for t, n in zip(times, s, strict=True))
        for s in splits
    ]
    assert least == pytest.approx(min(costs))
    assert sum(shares) == 12


@pytest.mark.parametrize(("stages", "devices"), [(7, 13), (8, 15), (6, 17), (8, 23)])
def test_a_split_into_many_stages_of_few_devices_each(stages: int, devices: int) -> None:
    times = [np.array([np.inf, *(1 / np.arange(1, devices + 1))])] * stages
    shares, least = split(times, devices, lambda seconds: np.max(np.stack(seconds), axis=0))
    assert (sum(shares), min(shares)) == (devices, devices // stages)
    assert least == pytest.approx(1 / (devices // stages))


def test_a_split_of_many_devices_is_close_to_the_ideal() -> None:
    planned = make_plan(
        chain(part("a", 0, 1), part("b", 0, 2), part("c", 0, 5)), 1 << 20, 4096, mode=Mode.DISAGGREGATED
    )
    ideal = (1 << 20) * 8 / 4096
    assert planned.best.seconds < ideal * 1.08
