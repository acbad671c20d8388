"""How long a queue takes: arithmetic that the simulator and the planner of a job share."""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def ends_in_turn(lengths: Sequence[float], slots: int) -> list[float]:
    """When each of these works ends, in ascending order, if `slots` are done at a time, each at the pace 1, and the
    next takes the place of one that has ended (Graham, "Bounds on multiprocessing timing anomalies", 1969)."""
    running, ended = list(lengths[:slots]), []
    heapify(running)
    for length in lengths[slots:]:
        ended.append(running[0])
        heapreplace(running, running[0] + length)
    return ended + sorted(running)
