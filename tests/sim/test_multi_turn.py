"""Trajectories that call tools between their turns, against hand-computed values."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.sim.decoder import Decoder
from rlix.sim.multi_turn import MultiTurn, MultiTurnRollout, Trajectory
from rlix.sim.work import MOMENT_S

# A step takes 1 s up to two trajectories, and half a second for each beyond; a token of context 0.01 s.
DECODER = Decoder(gpus=1, weights_s=1.0, compute_s=0.5, kv_s=0.0, max_batch=4, prefill_s=0.01)


def trajectory(*turns: tuple[float, int], again: int = 0) -> Trajectory:
    """Of each turn: what is waited before it, and its tokens."""
    waits, tokens = zip(*turns, strict=True)
    return Trajectory(np.array(waits, dtype=float), np.array(tokens, dtype=float), again)


def end_s(rollout: MultiTurnRollout) -> float:
    """From now on."""
    elapsed = 0.0
    for _ in range(10_000):
        left = rollout.remaining_s()
        if left <= MOMENT_S:
            return elapsed
        assert left < math.inf
        rollout.advance(left)
        elapsed += left
    raise AssertionError("it does not end")


def close(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-4)


def test_one_trajectory_of_two_turns() -> None:
    """Sandbox until 2, prompt of 10 and 3 tokens until 5.1, call until 7.1, context of 10 + 3 + 5 and 2 tokens."""
    one = [trajectory((2.0, 3), (2.0, 2))]
    rollout = MultiTurn(one, DECODER, prompt_tokens=10, result_tokens=5).begin()
    rollout.resize(1)
    rollout.advance(6.0)
    assert (rollout.alive, rollout.depth) == (1, 3.0)
    assert end_s(rollout) == close(7.1 + 2.18 - 6.0)
    assert (rollout.alive, rollout.done.tokens, rollout.prefill_gpu_s) == (0, 5.0, 0.0)
    assert MultiTurn(one, DECODER, 10, 5).shortest_s(1) == pytest.approx(9.28)


def test_a_bundle_that_caches_computes_only_what_is_new() -> None:
    work = MultiTurn([trajectory((2.0, 3), (2.0, 2))], replace(DECODER, caches=True), 10, 5)
    rollout = work.begin()
    rollout.resize(1)
    assert end_s(rollout) == close(7.1 + 2.05)
    assert work.shortest_s(1) == pytest.approx(9.15)


def test_after_a_failure_the_context_is_the_prompt_again() -> None:
    rollout = MultiTurn([trajectory((0.0, 3), (2.0, 2), again=1)], DECODER, 10, 5).begin()
    rollout.resize(1)
    assert end_s(rollout) == close(3.1 + 2.0 + 2.1)


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    """The second comes at 0.5 and is in the batch from 1 to 3; the third at 1.5 and makes steps of 1.5 s from 2 on.

    Steps end at 1, 2, 3.5 (the second's last), 4.5 and 5.5 (the third's last), 6.5 (the first's).
    """
    three = [trajectory((0.0, 6)), trajectory((0.5, 2)), trajectory((1.5, 3))]
    rollout = MultiTurn(three, DECODER).begin()
    rollout.resize(1)
    alive = []
    for _ in range(7):
        rollout.advance(1.0)
        alive.append(rollout.alive)
    assert alive == [3, 3, 3, 2, 2, 1, 0]
    rollout = MultiTurn(three, DECODER).begin()
    rollout.resize(1)
    assert end_s(rollout) == close(6.5)


def test_a_trajectory_that_waits_for_a_call_takes_no_room() -> None:
    """One at a time: the second decodes in the call of the first, which then has two tokens to compute again."""
    two = [trajectory((0.0, 2), (3.0, 2)), trajectory((0.1, 3))]
    rollout = MultiTurn(two, replace(DECODER, max_batch=1)).begin()
    rollout.resize(1)
    assert end_s(rollout) == close(2 + 3 + 2.02)


def test_shrunk_to_nothing_and_grown_again() -> None:
    """At 1.5 the bundle still ends its step; calls go on meanwhile; at 10 one computes what it lost, the other begins
    its second turn."""
    two = [trajectory((0.0, 4)), trajectory((0.0, 1), (5.0, 2))]
    rollout = MultiTurn(two, DECODER, prompt_tokens=10).begin()
    rollout.resize(1)  # both prompts: steps end at 1.2, 2.2
    rollout.advance(1.5)
    assert rollout.interruptible_s(0) == close(0.7)
    rollout.resize(0)
    rollout.advance(8.5)
    assert rollout.done.tokens == 2 + 1
    assert rollout.remaining_s() == math.inf
    rollout.resize(1)
    assert end_s(rollout) == close(2 + (10 + 2 + 10 + 1) * 0.01)
    assert rollout.prefill_gpu_s == pytest.approx(12 * 0.01)  # the other's was its turn's own
    assert rollout.unused_gpu_s == 0.0


def test_what_leaves_goes_on_elsewhere_and_bundles_beyond_the_trajectories_are_unused() -> None:
    """The second's bundle is taken at 0.5: from 1 on both are on the first, where its only token is computed again.
    Kept, it would be without a trajectory from 2 on."""
    rollout = MultiTurn([trajectory((0.0, 4)), trajectory((0.0, 2))], DECODER).begin()
    rollout.resize(2)
    rollout.advance(0.5)
    rollout.resize(1)
    assert end_s(rollout) == close(4.01 - 0.5)
    assert rollout.unused_gpu_s == 0.0
    rollout = MultiTurn([trajectory((0.0, 4)), trajectory((0.0, 2))], DECODER).begin()
    rollout.resize(2)
    assert end_s(rollout) == close(4.0)
    assert rollout.unused_gpu_s == pytest.approx(2.0)


turn = st.tuples(st.floats(0.0, 5.0), st.integers(1, 30))
seconds = st.integers(0, 80).map(lambda count: 0.375 * count)  # whose thirds add up to them exactly
drawn = st.lists(st.lists(turn, min_size=1, max_size=5).map(lambda turns: trajectory(*turns)), min_size=1, max_size=12)


@given(drawn, st.booleans(), st.lists(st.tuples(st.integers(0, 4), seconds), max_size=8))
@settings(max_examples=60, deadline=None)
def test_tokens_are_conserved_and_progress_does_not_depend_on_how_often_it_is_looked_at(
    trajectories: list[Trajectory], caches: bool, stretches: list[tuple[int, float]]
) -> None:
    work = MultiTurn(trajectories, replace(DECODER, caches=caches), 10, 3)
    looked_at, left_alone = work.begin(), work.begin()
    busy_s = 0.0
    for width, seconds in [*stretches, (2, 0.0)]:
        looked_at.resize(width)
        left_alone.resize(width)
        before = looked_at.done
        for _ in range(3):
            looked_at.advance(seconds / 3)
            assert looked_at.done.tokens >= before.tokens
            assert looked_at.remaining_s() >= 0.0
        left_alone.advance(seconds)
        busy_s += width * seconds + 4 * (1.0 + 4 * 400 * 0.01)  # and what leaves ends its step
        assert looked_at.done.tight_gpu_s <= busy_s
    ends = end_s(looked_at), end_s(left_alone)
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)
    for rollout in (looked_at, left_alone):
        assert rollout.alive == 0
        assert rollout.done.tokens == work.total.tokens == sum(t.tokens.sum() for t in trajectories)
        assert rollout.done.tight_gpu_s == pytest.approx(work.total.tight_gpu_s)


@given(drawn, st.integers(1, 4), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_more_bundles_are_never_later(trajectories: list[Trajectory], narrow: int, more: int) -> None:
    """With room for all and equal steps, but for the part of a step that each turn may have to wait for."""
    work = MultiTurn(trajectories, replace(DECODER, compute_s=0.01, prefill_s=0.0, max_batch=100))
    ends = []
    for width in (narrow, narrow + more):
        rollout = work.begin()
        rollout.resize(width)
        ends.append(end_s(rollout))
        assert ends[-1] >= work.shortest_s(width) - 1e-4
        assert rollout.done.tight_gpu_s + rollout.unused_gpu_s <= width * ends[-1] + 1e-3
    assert ends[1] <= ends[0] + max(len(t.tokens) for t in trajectories) * 1.0
    alone = work.begin()
    alone.resize(len(trajectories) * 6)  # an idle one for every turn
    assert end_s(alone) <= min(ends) + 1e-3
