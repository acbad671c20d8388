"""What a rollout tells the scheduler of itself, against what it was made to measure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.inference.requests import DecodingCounters
from rlix.pipeline.rollout.rebalance import Estimates, StepLine, rollout_s
from rlix.pipeline.rollout.router import Router
from tests.pipeline.rollout_world import chunk, collected, trajectory


@given(st.floats(0.001, 1.0), st.floats(1.0, 200.0), st.lists(st.integers(1, 64), min_size=30, max_size=60))
def test_the_knee_is_found_from_batches_of_several_sizes(empty_s: float, knee: float, batches: list[int]) -> None:
    line = StepLine()
    for batch in [1, 64, *batches]:
        line.saw(batch, empty_s * (1 + batch / knee))
    assert line.knee() == pytest.approx(knee, rel=1e-3)


def test_no_knee_is_made_up() -> None:
    same, falling = StepLine(), StepLine()
    for _ in range(9):
        same.saw(32, 0.5)
    for batch in (1, 8, 64):
        falling.saw(batch, 1 / batch)
    assert same.knee() is None
    assert falling.knee() is None


def test_a_learnt_knee_stays_within_the_slots() -> None:
    estimates = Estimates(slots=8)
    for batch in (1, 2, 4, 8):
        estimates.saw_steps(seconds=1 + batch / 1000, steps=1, tokens=batch)
    assert estimates.knee == 8
    for batch in (1, 2, 4, 8):
        estimates.saw_steps(seconds=0.001 + batch, steps=1, tokens=batch)
    assert estimates.knee == 1


def test_the_time_of_a_rollout_by_hand() -> None:
    estimates = Estimates(slots=4, knee=2.0, step_s=0.5)
    # 3 + 5 tokens: the longer takes 5 steps of 0.5 s, and the arithmetic of 8 tokens is worth 8 / 2 steps
    assert rollout_s([3, 5], estimates) == (2.0, 2.5)
    # 8 trajectories of 3 in 4 slots: one more round of 3 steps besides the arithmetic of 24 tokens, 12 steps
    assert rollout_s([3.0] * 8, estimates) == (7.5, 1.5)
    assert rollout_s([], estimates) == (0.0, 0.0)
    assert rollout_s([3.0], Estimates(slots=4)) == (0.0, 0.0)


def test_demand_is_what_is_expected_and_not_what_is_allowed() -> None:
    router = Router(replicas=1, slots=4, spare=1)
    router.submit([trajectory("a", 100)])
    assert router.demand(0.0).tokens == 100
    router.loading(0)
    router.ready(0)
    ((_, requests),) = router.dispatch(0.0)
    counters = DecodingCounters(steps=100, seconds=10.0, tokens=100)
    router.take(0, collected(chunk(requests[0], 0, 100), counters=counters), now=10.0)
    router.submit([trajectory("b", 1000), trajectory("c", 1000)])
    router.dispatch(10.0)
    start, later = router.demand(10.0), router.demand(15.0)
    assert (start.trajectories, start.tokens) == (2, 200), "both are expected to end where a did"
    step_s = 10.0 / 100 / (1 + 1 / 4)  # a was alone; the knee is taken to be at all slots
    assert start.floor_s == pytest.approx(100 * step_s)
    assert start.work_s == pytest.approx(200 * step_s / 4)
    assert later.tokens < start.tokens, "they go on meanwhile"
    assert later.work_s < start.work_s
