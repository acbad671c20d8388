"""When the garbage collector runs: on a large pool it takes as long as a turn of planning, to find everything alive."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from rlix.control.ports import Clock

_EVERY_S = 60.0
_NEVER = 2**31 - 1  # collections of younger objects


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage meanwhile: what a long turn allocates lives until it is done, and is then kept, or freed by
    its reference counts."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_between_turns(clock: Clock) -> None:
    """From now on this process looks through old objects in a turn of its own, once a minute, and in no other."""
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)

    def collect() -> None:
        gc.collect()
        clock.call_later(_EVERY_S, collect)

    clock.call_later(_EVERY_S, collect)
