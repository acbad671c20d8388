import gc
import weakref
from collections.abc import Iterator

import pytest

from rlix.control.garbage import collect_between_turns
from rlix.sim.clock import VirtualClock


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


class Circle:
    def __init__(self) -> None:
        self.me = self


def test_old_garbage_goes_once_a_minute_and_at_no_other_time(thresholds: tuple[int, int, int]) -> None:
    clock = VirtualClock()
    collect_between_turns(clock)
    young, middle, old_ones = gc.get_threshold()
    assert (young, middle) == thresholds[:2] and old_ones > 1e9
    for _ in range(2):
        old = Circle()
        gc.collect()  # by now it is
        gone = weakref.ref(old)
        del old
        assert gone() is not None
        clock.run(clock.time() + 60.0)
        assert gone() is None
