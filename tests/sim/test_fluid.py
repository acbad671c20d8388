"""Decode speed and a rollout's way through its trajectories, against hand-computed values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.sim.decoder import Decoder
from rlix.sim.fluid import Curve, FluidRollout

PLAIN = Decoder(gpus=1, weights_s=0.010, compute_s=0.0001, kv_s=0.0, max_batch=200, prefill_s=0.0)


def test_a_step_costs_the_weights_up_to_the_knee_and_arithmetic_beyond() -> None:
    assert PLAIN.knee == pytest.approx(100)
    paces = PLAIN.token_s(np.array([1.0, 50.0, 100.0, 200.0, 400.0]))
    assert paces == pytest.approx([0.010, 0.010, 0.010, 0.020, 0.040])  # 400: 200 take turns


def test_reference_efficiency_is_the_best_batch() -> None:
    assert PLAIN.reference_gpu_s == pytest.approx(0.0001)


def test_two_trajectories_on_one_bundle_by_hand() -> None:
    curve = Curve(np.array([100.0, 300.0]), PLAIN)
    assert curve.seconds(1)[-1] == pytest.approx(3.0)
    assert curve.tokens[-1] == 400
    assert (curve.alive(99), curve.alive(100), curve.alive(300)) == (2, 1, 0)
    assert curve.unused(2)[-1] == pytest.approx(2.0)  # one bundle has nothing from the hundredth token on


def test_width_divides_only_what_is_above_the_knee() -> None:
    curve = Curve(np.full(400, 100.0), PLAIN)
    assert curve.seconds(1)[-1] == pytest.approx(4.0)
    assert curve.seconds(2)[-1] == pytest.approx(2.0)
    assert curve.seconds(8)[-1] == pytest.approx(1.0)


def test_a_shrunk_rollout_keeps_its_tokens_and_pays_the_prefill() -> None:
    decoder = Decoder(gpus=1, weights_s=0.01, compute_s=0.0001, kv_s=0.0, max_batch=200, prefill_s=0.001)
    rollout = FluidRollout(Curve(np.full(10, 100.0), decoder, prompt_tokens=20))
    rollout.resize(2)
    rollout.advance(0.5)
    assert rollout.depth == pytest.approx(50)
    rollout.resize(1)  # five trajectories of 70 tokens move
    assert rollout.remaining_s() == pytest.approx(0.5 + 5 * 70 * 0.001)
    rollout.resize(0)
    rollout.advance(1000)
    assert rollout.depth == pytest.approx(50)
    rollout.resize(1)  # now all ten have to be rebuilt
    assert rollout.remaining_s() == pytest.approx(0.5 + 10 * 70 * 0.001)


lengths = st.lists(st.integers(1, 3000), min_size=1, max_size=60).map(lambda x: np.array(x, dtype=np.float64))


@given(lengths, st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_widening_shortens_time_but_never_saves_gpu_seconds(tokens: np.ndarray, narrow: int, more: int) -> None:
    decoder = Decoder(gpus=1, weights_s=0.01, compute_s=0.0002, kv_s=0.00005, max_batch=64, prefill_s=0.0)
    curve = Curve(tokens, decoder)
    wide = narrow + more
    assert curve.seconds(wide)[-1] <= curve.seconds(narrow)[-1] + 1e-9
    assert wide * curve.seconds(wide)[-1] >= narrow * curve.seconds(narrow)[-1] * (1 - 1e-9)
    assert curve.tight_gpu_s[-1] >= curve.tokens[-1] * decoder.reference_gpu_s * (1 - 1e-9)


@given(lengths, st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 8.0)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_progress_does_not_depend_on_how_often_it_is_looked_at(
    tokens: np.ndarray, stretches: list[tuple[int, float]]
) -> None:
    looked_at, left_alone = (FluidRollout(Curve(tokens, PLAIN, 10)) for _ in range(2))
    for width, seconds in stretches:
        looked_at.resize(width)
        left_alone.resize(width)
        before = looked_at.depth
        for _ in range(3):
            looked_at.advance(seconds / 3)
            assert looked_at.depth >= before
        left_alone.advance(seconds)
        assert looked_at.depth == pytest.approx(left_alone.depth, rel=1e-6, abs=1e-6)
    assert looked_at.unused_gpu_s == pytest.approx(left_alone.unused_gpu_s, rel=1e-6, abs=1e-6)


def test_who_finds_no_room_waits_until_another_has_ended() -> None:
    narrow = Decoder(gpus=1, weights_s=0.01, compute_s=0.001, kv_s=0.0, max_batch=2, prefill_s=0.0)
    curve = Curve(np.array([100.0, 300.0, 200.0, 300.0]), narrow)  # end at 100, 300, 300 and 600 on two slots
    assert curve.seconds(1)[-1] == pytest.approx(6.0)
    assert curve.seconds(2)[-1] == pytest.approx(3.0)  # room for all four
    assert curve.tight_gpu_s[-1] == pytest.approx(4.5)  # 900 tokens, two at a time
