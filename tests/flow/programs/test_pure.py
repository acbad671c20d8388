"""What runs a flow, without running it: pieces of batches, drift, and profiles in files."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.planner import Component, Edge, Graph, Mode, Plan, Point, SegmentPlan, StagePlan, Table, make_plan
from rlix.flow.planner.plan import LoopPlan, PartPlan
from rlix.flow.profiler.measure import Grid
from rlix.flow.profiler.profile import PartProfile, Profile, machine
from rlix.flow.programs.drift import WINDOW, Drift, rescaled
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.pieces import Pieces, cut, shard, size
from rlix.flow.programs.wiring import Circle, Part
from rlix.protocol.errors import SpecError
from rlix.protocol.types import Phase


class Nothing(FlowWorker):
    def run(self, items: list[int]) -> list[int]:
        return items

    def go(self, items: list[int]) -> list[int]:
        return items


class Other(Nothing): ...


class Rolls(Nothing):
    phase = Phase.ROLLOUT


def values(pieces: Pieces) -> list[int]:
    return [value for ref, start, stop in pieces for value in ref[start:stop]]


@given(st.lists(st.lists(st.integers(), max_size=6), max_size=5), st.integers(1, 5), st.data())
def test_cutting_and_sharing_lose_nothing(lists: list[list[int]], ranks: int, data: st.DataObject) -> None:
    pieces = [(part, 0, len(part)) for part in lists]
    whole = values(pieces)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    middle = cut(pieces, begin, end)
    assert (values(middle), size(middle)) == (whole[begin:end], end - begin)
    shares = shard([middle, middle], ranks)
    assert [value for share in shares for value in values(share[0])] == whole[begin:end]
    sizes = [size(share[1]) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_drift_is_what_lasts() -> None:
    parts = [Component(name, Table([Point(1, 8, 1.0)])) for name in "ab"]
    plan = make_plan(Graph(parts, [Edge("a", "b")]), 8, 1).best
    drift = Drift.of(plan)
    for factor in (1.3, 1.1, 1.3):
        drift.saw({"a": [(8, factor)], "b": [(8, 1.0), (3, 9.0)]})
    assert drift.factors() == {}
    for _ in range(WINDOW):
        drift.saw({"a": [(8, 1.3)], "b": [(8, 1.0)]})
    assert drift.factors() == {"a": pytest.approx(1.3), "b": pytest.approx(1.0)}
    known = Drift.of(rescaled(plan, drift.factors(), {"b": ("a",)}))
    for _ in range(WINDOW):
        known.saw({"a": [(8, 1.3)], "b": [(8, 1.0)]})
    assert known.factors() == {}


def test_what_a_plan_takes_when_a_part_is_slower() -> None:
    parts = [Component(name, Table([Point(1, n, 0.5 + n / 2) for n in (1, 8)])) for name in "abc"]
    graph = Graph(parts, [Edge("a", "b"), Edge("a", "c")])
    plan = make_plan(graph, 8, 3, mode=Mode.DISAGGREGATED).best
    after = {"a": (), "b": ("a",), "c": ("a",)}
    (segment,) = plan.segments
    assert rescaled(plan, {}, after).seconds == pytest.approx(plan.seconds)
    slower = rescaled(plan, {"a": 2.0, "b": 3.0}, after)
    call, chunks = 0.5 + segment.chunk / 2, 8 // segment.chunk
    assert slower.seconds == pytest.approx(2 * call + 3 * call * chunks)  # c ends sooner, beside b
    assert {part.name: part.seconds / call for part in slower.parts} == pytest.approx({"a": 2.0, "b": 3.0, "c": 1.0})
    in_turn = make_plan(graph, 8, 3, mode=Mode.COLLOCATED).best
    assert rescaled(in_turn, {"b": 2.0}, after).seconds == pytest.approx(in_turn.seconds * 4 / 3)


def test_what_a_circle_takes_when_its_parts_are_slower() -> None:
    a, b = PartPlan("a", 1, 0, 1, 1.0), PartPlan("b", 1, 1, 1, 1.0)

    def seconds(loop: LoopPlan, planned: float, **factors: float) -> float:
        stage = StagePlan((a, b), 0, 2, planned, loops=(loop,))
        plan = Plan((SegmentPlan((stage,), 8, planned),), 8, 2, planned, 0.0, True)
        return rescaled(plan, factors, {}).seconds

    beside = LoopPlan(("a", "b"), rounds=10, slices=2, shared=False)  # a round: both slices in either part
    assert seconds(beside, 21.0) == pytest.approx(21.0)  # 1 until b begins, and 2 for each of ten rounds
    assert seconds(beside, 21.0, a=2.0, b=2.0) == pytest.approx(42.0)
    assert seconds(beside, 21.0, b=2.0) == pytest.approx(41.0)  # of which a waits half
    assert seconds(beside, 21.0, b=0.5) == pytest.approx(20.5)
    in_turn = LoopPlan(("a", "b"), rounds=10, slices=1, shared=True)
    assert seconds(in_turn, 25.0, b=2.0) == pytest.approx(35.0)  # 5 of them switch


def test_a_profile_is_kept_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    points = tuple(Point(1, n, float(n)) for n in (1, 2, 4))
    mine = Part("a", Nothing, "run").measured
    profile = Profile("f", "m", {"a": PartProfile(points, 0.5, 0.25, mine)}, {("a", "b"): (0.1, 0.2)})
    path = tmp_path / "deep" / "f.json"
    profile.write(path)
    assert Profile.read(path) == Profile.read(str(path)) == profile
    assert f"was measured on m, and this is {machine()}" in caplog.text
    caplog.clear()
    replace(profile, machine=machine()).write(path)
    Profile.read(path)
    assert not caplog.records
    assert "held-out error 0.0% mean" in profile.describe()
    assert profile.scaled({"a": 2.0}).parts["a"].points[1].seconds == 4.0
    with pytest.raises(SpecError, match="run `rlix profile` first"):
        Profile.read(tmp_path / "none.json")
    path.write_text("[]")
    with pytest.raises(SpecError, match="is not a profile"):
        Profile.read(path)
    profile.write(path)
    whole = path.read_text()
    for number, wrong in (
        ('"seconds": 2.0', '"seconds": -2.0'),
        ('"seconds": 2.0', '"seconds": "2"'),
        ('"items": 2', '"items": 0'),
    ):
        assert number in whole
        path.write_text(whole.replace(number, wrong))
        with pytest.raises(SpecError, match=f"{path} is not a profile"):
            Profile.read(path)
    path.write_text('{"parts": []}')
    with pytest.raises(SpecError, match="is not a profile"):
        Profile.read(path)
    flow = Flow("f", [Part("a", Nothing, "run"), Part("b", Nothing, "run", ("a",))], 4)
    with pytest.raises(SpecError, match="flow f: the profile is of flow g"):
        flow.plan(replace(profile, flow="g"), 2)
    with pytest.raises(SpecError, match="has no part b"):
        flow.plan(profile, 2)
    with pytest.raises(SpecError, match="give it `sample`"):
        flow.sample(1)


def test_states_stay_side_by_side_only_where_the_measured_devices_have_room(tmp_path: Path) -> None:
    part = PartProfile((Point(1, 4, 1.0, 60.0, 60.0),), 0.1, 0.1)
    flow = Flow("f", [Part("a", Nothing), Part("b", Nothing)], 4)
    Profile("f", machine(), {"a": part, "b": part}, device_bytes=80.0).write(tmp_path / "f.json")
    known = Profile.read(tmp_path / "f.json")
    assert flow.plan(known, 1).best.switch_s == pytest.approx(0.4)
    assert flow.plan(known, 1, device_bytes=120.0).best.switch_s == 0.0
    assert flow.plan(replace(known, device_bytes=float("inf")), 1).best.switch_s == 0.0
    assert known.scaled({"a": 2.0}).device_bytes == 80.0


def test_a_flow_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SpecError, match="two parts are called 'a'"):
        Flow("f", [Part("a", Nothing, "run"), Part("a", Nothing, "run")], 4)
    with pytest.raises(SpecError, match=r"b comes after \['c'\], and before it there are \['a'\]"):
        Flow("f", [Part("a", Nothing), Part("b", Nothing, "run", ("c",))], 4)
    for items in (0, 64.0):
        with pytest.raises(SpecError, match=f"1 item or more, not {items}"):
            Flow("f", [Part("a", Nothing, "run")], items)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"b comes after \['c'\]"):
        Flow("f", (part for part in [Part("b", Nothing, "run", ("c",))]), 4)  # type: ignore[arg-type]
    a, b = Part("a", Nothing, "run"), Part("b", Nothing, "run", ("a",))
    for names, rounds in ((("a",), 2), (("b", "a"), 2), (("a", "b"), 0), (("a", "b"), 2.5), (("a", "c"), 2)):
        with pytest.raises(SpecError, match="is no circle"):
            Flow("f", [a, b], 4, circles=[Circle(names, rounds)])  # type: ignore[arg-type]
    parts = [Component(name, Table([Point(1, 8, 1.0)])) for name in "ab"]
    with pytest.raises(SpecError, match="a → b is a circle: its last edge needs `rounds`, a whole number"):
        Graph(parts, [Edge("a", "b"), Edge("b", "a", rounds=2.5)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": ""}, "a part's name is 1 to 64 letters"),
        ({"name": "a:b"}, "a part's name is 1 to 64 letters"),
        ({"name": None}, "a part's name is 1 to 64 letters"),
        ({"worker": dict, "method": "keys"}, r"dict.* is not a class derived from rlix.flow\.FlowWorker"),
        ({"worker": Nothing()}, r"is not a class derived from rlix.flow\.FlowWorker"),
        ({"method": "walk"}, "a: Nothing has no method 'walk'"),
        ({"method": "__init__"}, "a: Nothing has no method '__init__'"),
        ({"method": "mro"}, "a: Nothing has no method 'mro'"),
        ({"after": (name for name in "bb")}, r"a: after=\('b', 'b'\) names a part twice"),
        ({"method": Nothing.run}, "a: the method is given by its name, such as 'run', not <function"),
        ({"after": "ab"}, r"a: after='ab' is not a tuple of names: write after=\('ab',\)"),
        ({"after": ("b", "b")}, "names a part twice"),
        ({"after": 3}, "a: after is a list of str, not 3"),
        ({"after": [None]}, "a: after is a list of str, and None is none"),
        ({"kwargs": [1]}, r"a: kwargs is a dict of Nothing's arguments by name, not \[1\]"),
        ({"kwargs": {1: 2}}, "a: kwargs is a dict of Nothing's arguments by name"),
        ({"unit": 0}, "a: unit must be a whole number from 1 on, not 0"),
        ({"unit": 1.5}, "a: unit must be a whole number from 1 on, not 1.5"),
        ({"most": "2"}, "a: most must be a whole number from 1 on, not '2'"),
        ({"chunk": 0}, "a: chunk must be a whole number from 1 on, not 0"),
        ({"worker": Rolls}, "a: a part's devices are held, and rollouts' come and go: choose another phase"),
        ({"each": 0}, r"a: each is a multiple of its chunk \(1\), not 0"),
        ({"each": 3, "chunk": 2}, r"a: each is a multiple of its chunk \(2\), not 3"),
        ({"cpu_ranks": -1}, "a: cpu_ranks must be a whole number from 0 on, not -1"),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Part(**{"name": "a", "worker": Nothing, "method": "run", **wrong})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *(({"name": name}, "a flow's name is 1 to 64 letters") for name in ("", "../../x", "a:b", 3, None, "x" * 65)),
        ({"parts": []}, "flow f: a flow has 1 to 8 parts, not 0"),
        ({"parts": [Part(f"p{n}", Nothing, "run") for n in range(9)]}, "flow f: a flow has 1 to 8 parts, not 9"),
        (
            {"parts": Part("a", Nothing, "run")},
            r"flow f: parts \(each a Part, or a class .*\) is a list of Part, not Part",
        ),
        ({"parts": ["a"]}, r"flow f: parts \(each a Part, or a class .*\) is a list of Part, and 'a' is none"),
        ({"sample": 3}, "flow f: sample is a function that makes so many items, not 3"),
        ({"circles": Circle(("a", "b"), 2)}, "flow f: circles is a list of Circle, not Circle"),
    ],
)
def test_a_flow_of_something_else_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Flow(**{"name": "f", "parts": [Part("a", Nothing, "run")], "items": 4, **wrong})


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"cpu_ranks": 2}, {}),
        ({}, {"cpu_ranks": 2}),
        ({}, {"unit": 2}),
        ({}, {"each": 2}),
        ({}, {"worker": Other}),
        ({}, {"method": "go"}),
    ],
)
def test_tables_of_what_a_part_was_before_are_refused(before: dict[str, Any], now: dict[str, Any]) -> None:
    first, then = (Part(**{"name": "a", "worker": Nothing, "method": "run", **given}) for given in (before, now))
    known = Profile("f", "m", {"a": PartProfile((Point(1, 4, 1.0),), measured=first.measured)})
    assert Flow("f", [first], 4).plan(known, 2).best.items == 4
    said = rf"a was measured as {re.escape(first.measured)}, and is {re.escape(then.measured)} now: run `rlix profile"
    with pytest.raises(SpecError, match=said):
        Flow("f", [then], 4).plan(known, 2)


def test_a_grid_measures_something() -> None:
    for wrong in (((), (1,), 1), ((1,), (), 1), ((0,), (1,), 1), ((1,), (2.5,), 1), ((1,), (1,), 0), (1, (1,), 1)):
        with pytest.raises(SpecError, match="all whole numbers from 1 on"):
            Grid(*wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("made", [None, {"loss": 1.0}, "done", 1.0])
def test_what_is_no_list_is_not_taken_for_one(made: object) -> None:
    worker: Any = FlowWorker()
    worker.made = lambda items: made
    with pytest.raises(TypeError, match=rf"made\(\) returned {type(made).__name__}: a part returns a list"):
        worker._rlix_part("made", [[]])


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("exits", [sys.exit, lambda items: (sys.exit(items) for _ in "one")])
def test_a_part_that_exits_is_an_error_and_lives(exits: Any) -> None:
    worker: Any = FlowWorker()
    worker.exits = exits
    with pytest.raises(RuntimeError, match=r"exits\(\) was left by SystemExit\(\[\]\)"):
        worker._rlix_part("exits", [[]])
