"""Planning without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage meanwhile.

    What a plan allocates lives until it is done and is then freed by its reference counts. On a large pool a collection
    in between takes as long as the plan, to find everything alive.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
