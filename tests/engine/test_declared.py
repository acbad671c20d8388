"""Declared speed: the formula by hand, and waiting until the declared end and no longer."""

import pytest

from rlix.engine.declared import AS_IT_IS, Deadlines, DeclaredSpeed


class Clock:
    """Goes on only by sleeping, and by what work takes."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.mark.parametrize(
    ("sequences", "context", "seconds"),
    [
        (1, 0, 0.100 + 40e-6),  # bound by memory: the weights, and one cache
        (48, 0, 0.100 + 48 * 40e-6),  # at the knee
        (96, 0, 0.200 + 96 * 40e-6),  # bound by arithmetic: twice the knee takes twice as long
        (1, 1000, 0.100 + 40e-6 + 0.025),
    ],
)
def test_a_step_follows_the_roofline(sequences: int, context: int, seconds: float) -> None:
    speed = DeclaredSpeed(token_ms=100.0, knee=48.0, kv_us=40.0, prefill_us=25.0)
    assert speed.decode_s(sequences, context) == pytest.approx(seconds)
    assert AS_IT_IS.decode_s(sequences, context) == 0.0


def test_work_lasts_as_long_as_declared_and_what_takes_longer_is_counted() -> None:
    clock = Clock()
    deadlines = Deadlines(clock, clock.sleep)
    with deadlines.lasting(2.0):
        clock.now += 0.5
    assert (clock.now, deadlines.late_s) == (2.0, 0.0)
    with deadlines.lasting(1.0):
        clock.now += 1.25
    assert (clock.now, deadlines.late_s) == (3.25, 0.25)
    with deadlines.lasting(0.0):  # nothing was declared: it takes as long as it takes
        clock.now += 1.0
    assert (clock.now, clock.slept, deadlines.late_s) == (4.25, 1.5, 0.25)
    with pytest.raises(ValueError, match="mine"), deadlines.lasting(9.0):
        raise ValueError("mine")
    assert clock.now == 4.25, "what failed is not waited for"
