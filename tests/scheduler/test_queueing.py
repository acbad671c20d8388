"""List scheduling, against hand-computed values and what is true of every order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.scheduler.queueing import ends_in_turn


def test_by_hand() -> None:
    assert ends_in_turn([100, 300, 200, 300], 2) == [100, 300, 300, 600]
    assert ends_in_turn([3, 1, 2], 4) == [1, 2, 3]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 50))
def test_no_slot_idles_while_somebody_waits(lengths: list[int], slots: int) -> None:
    ends = ends_in_turn(lengths, slots)
    assert ends == sorted(ends)
    assert len(ends) == len(lengths)
    assert ends[-1] >= max(sum(lengths) / slots, *lengths)
    assert ends[-1] <= sum(lengths) / slots + max(lengths) * (1 - 1 / slots) + 1e-9  # Graham's bound
    if slots >= len(lengths):
        assert ends == pytest.approx(sorted(lengths))
