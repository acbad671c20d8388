"""Tables: what lies between measurements, what lies outside, and how wrong they are about what they were not told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.flow.planner.tables import Point, Table
from rlix.protocol.errors import SpecError


def law(width: int, items: int) -> float:
    """Seconds that are linear in the load and grow with the logarithm of nothing: what a table gets exactly right."""
    return 0.5 + 0.25 * -(-items // width)


def test_between_points_and_beyond() -> None:
    table = Table([Point(1, 2, 1.0), Point(1, 4, 2.0), Point(1, 8, 3.0), Point(4, 8, 4.0), Point(4, 16, 8.0)])
    assert table.seconds(1, 3) == pytest.approx(1.5)
    assert table.seconds(1, 6) == pytest.approx(2.5)
    assert table.seconds(1, 1) == pytest.approx(0.5)
    assert table.seconds(1, 12) == pytest.approx(4.0)
    assert table.seconds(2, 4) == pytest.approx((1.0 * 4.0) ** 0.5)  # load 2, halfway between widths 1 and 4
    assert table.seconds(16, 32) == pytest.approx(4.0)  # load 2, as on the widest
    assert table.unknown(1, 3) == ""
    assert table.unknown(2, 6) == ""
    assert table.unknown(16, 32) == "width 16 is outside the measured 1–4"
    assert table.unknown(1, 9) == "9 items a rank are outside the measured 2–8"
    assert table.unknown(2, 10) == "5 items a rank are outside the measured 2–4"


def test_bytes_are_of_the_fullest_device() -> None:
    table = Table([Point(1, 4, 1.0, 100.0, 60.0), Point(1, 8, 1.0, 140.0, 50.0), Point(2, 8, 1.0, 70.0, 30.0)])
    assert list(table.peak_bytes([1, 2], 4)) == pytest.approx([100.0, 35.0 + 0.0 * 1], abs=40)
    assert table.peak_bytes([1], 6)[0] == pytest.approx(120.0)
    assert list(table.resident_bytes([1, 2])) == pytest.approx([60.0, 30.0])


@given(st.sets(st.integers(1, 40), min_size=3, max_size=6), st.sets(st.sampled_from([1, 2, 3, 4, 8]), min_size=1))
def test_what_is_linear_in_the_load_is_known_everywhere(loads: set[int], widths: set[int]) -> None:
    table = Table([Point(w, w * load, law(w, w * load)) for w in widths for load in loads])
    for width in (1, 2, 5, 16):
        for items in (width * min(loads), width * max(loads)):
            assert table.seconds(width, items) == pytest.approx(law(width, items))
    held = table.hold_out()
    assert held is not None
    assert held.worst == pytest.approx(0, abs=1e-9)


def test_the_hold_out_error_is_that_of_the_neighbours_line() -> None:
    table = Table([Point(1, 1, 1.0), Point(1, 2, 4.0), Point(1, 3, 3.0)])
    held = table.hold_out()
    assert held is not None
    assert (held.points, held.worst) == (1, pytest.approx(0.5))  # 2.0 where 4.0 was measured
    assert Table([Point(1, 1, 1.0), Point(1, 2, 4.0)]).hold_out() is None


def test_what_is_no_measurement_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one"):
        Table([])
    with pytest.raises(SpecError, match="not a measurement"):
        Table([Point(1, 1, 0.0)])
