"""How long a circle takes, whose slices begin one after the other."""

from typing import TypeVar

import numpy as np

from rlix.flow.planner.tables import Array

T = TypeVar("T", float, Array)


def rounds_s(rounds: int, slices: int, once: T, longest: T) -> T:
    """Until all slices have gone round so often: each takes `once` for it when nobody is in its way, `longest` of that
    in the slowest part.

    Each slice leaves the slowest part that long after the one before it. Then every round takes what one slice does, or
    what all of them do in the slowest part.
    """
    seconds = once
    if slices > 1:  # none times infinity is no number
        seconds = seconds + (slices - 1) * longest
    if rounds > 1:
        seconds = seconds + (rounds - 1) * np.maximum(once, slices * longest)
    return seconds
