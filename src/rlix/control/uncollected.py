"""Long turns without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage meanwhile.

    What such a turn allocates lives until it is done, and is then kept, or freed by its reference counts. On a large
    pool a collection in between takes as long as the turn, to find everything alive.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
