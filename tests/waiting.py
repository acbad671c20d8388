"""Waiting in tests. The bound is a guard against hanging only: how long anything takes says how busy the machine is."""

import time
from collections.abc import Callable

HANG_S = 300.0
PROGRAM_S = 800.0  # for a whole program, within the bound of a test


def until(true: Callable[[], object], what: str | Callable[[], str]) -> None:
    """Returns once `true()` is. `what`: says, when that takes for ever, what never happened."""
    deadline = time.monotonic() + HANG_S
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(what if isinstance(what, str) else what())
        time.sleep(0.02)
