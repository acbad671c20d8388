"""When parts work, by hand and of many plans."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.flow.planner import (
    Component,
    Edge,
    Graph,
    LoopPlan,
    PartPlan,
    Plan,
    Point,
    SegmentPlan,
    StagePlan,
    Table,
    make_plan,
)
from rlix.flow.planner.timeline import Block, blocks, lanes

_COSTS = st.tuples(st.floats(0.01, 1), st.floats(0.001, 0.1), st.floats(0, 1), st.booleans())


def test_stages_work_beside_each_other_on_chunks_and_segments_follow() -> None:
    slow = StagePlan((PartPlan("make", 1, 0, 1, 2.0),), 0, 1, 2.0)
    quick = StagePlan((PartPlan("score", 2, 1, 2, 1.0),), 1, 2, 1.5)  # half a second to move what was made
    train = StagePlan((PartPlan("train", 3, 0, 3, 4.0),), 0, 3, 4.0)
    segments = (SegmentPlan((slow, quick), 8, 5.5), SegmentPlan((train,), 16, 4.0))
    plan = Plan(segments, 16, 3, 10.5, 1.0, resident=False)  # half a second before each segment
    found = blocks(plan, {"score": ("make",), "train": ("score",)})
    assert found == [
        Block("", 0, 1, 0.0, 0.5),
        Block("", 1, 2, 0.0, 0.5),
        Block("make", 0, 1, 0.5, 2.5, 0),
        Block("", 1, 2, 2.5, 3.0, 0),
        Block("score", 1, 2, 3.0, 4.0, 0),
        Block("make", 0, 1, 2.5, 4.5, 1),
        Block("", 1, 2, 4.5, 5.0, 1),
        Block("score", 1, 2, 5.0, 6.0, 1),
        Block("", 0, 3, 6.0, 6.5),
        Block("train", 0, 3, 6.5, 10.5),
    ]
    assert [(name, len(on)) for name, on in lanes(3, found)] == [("0", 5), ("1–2", 7)]


def test_a_circle_is_one_block_wherever_it_works() -> None:
    parts = (PartPlan("act", 2, 0, 2, 1.0), PartPlan("world", 4, 0, 0, 3.0))
    stage = StagePlan(parts, 0, 2, 20.0, loops=(LoopPlan(("act", "world"), 5, 1, shared=True),))
    plan = Plan((SegmentPlan((stage,), 8, 20.0),), 8, 2, 20.0, 0.0, resident=True)
    acts, world = Block("⟲ act", 0, 2, 0.0, 20.0), Block("⟲ world", 0, 0, 0.0, 20.0)
    assert blocks(plan, {"world": ("act",)}) == [acts, world]
    assert lanes(2, [acts, world]) == [("0–1", [acts]), ("CPU", [world])]


@given(
    st.lists(_COSTS, min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_no_device_does_two_things_at_once_and_the_last_ends_with_the_step(
    costs: list[tuple[float, float, float, bool]], devices: int
) -> None:
    parts = []
    for i, (fixed, each, switch, large) in enumerate(costs):
        held = 60.0 if large else 5.0
        points = [Point(w, w * load, fixed + each * load, held, held) for w in (1, 4) for load in (1, 16)]
        parts.append(Component(f"p{i}", Table(points), load_s=switch, offload_s=switch))
    edges = [Edge(f"p{i}", f"p{i + 1}", 0.01) for i in range(len(parts) - 1)]
    planned = make_plan(Graph(parts, edges), 16, devices, device_bytes=80.0)
    for plan in (planned.best, *planned.others):
        found = blocks(plan, {edge.target: (edge.source,) for edge in edges})
        assert max(block.end for block in found) == pytest.approx(plan.seconds)
        for _, on in lanes(devices, found):
            for before, later in pairwise(sorted(on, key=lambda block: (block.start, block.end))):
                assert later.start >= before.end - 1e-9
