"""Passing devices on from one engine of a program to another: at the same time, where both can."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlix.engine.base import Engine
from rlix.engine.life_cycle import Residency
from rlix.engine.residency import MoveReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What it took. `overlapped`: the two moves went on at the same time, in `seconds` together.

    That says nothing of copies: on virtual GPUs, where engines overlap by default, none are made.
    """

    left: MoveReport
    came: MoveReport
    seconds: float
    overlapped: bool


def swap(leaving: Engine, arriving: Engine, *, clock: Callable[[], float] = time.perf_counter) -> SwapReport:
    """`leaving.cpu()` and `arriving.cuda()`: one after the other, or overlapping.

    They overlap where both engines were built with `gradual_moves`, hold no lease, and the one that comes waits in host
    memory: its weights come part by part as the other's leave, and its KV cache when they have left. One
    that could not wait for so long comes once the other has left.

    Raises:
        Whatever the two calls raise, first what the one that leaves did; the other's is logged then. Either engine's
        `life` says where it is then; an overlapping one that came has its weights on the devices, also if the other
        did not leave.
    """
    start = clock()
    if not _can_overlap(leaving, arriving):
        left, came = leaving.cpu(), arriving.cuda()
        return SwapReport(left, came, clock() - start, overlapped=False)
    with ThreadPoolExecutor(2, thread_name_prefix="swap") as pool:
        leaves, comes = pool.submit(leaving.cpu), pool.submit(arriving.cuda, "weights")
    in_vain = comes.exception()
    if in_vain is not None:
        logger.warning("%s did not come while %s was leaving: %s", arriving.name, leaving.name, in_vain)
        left, came = leaves.result(), arriving.cuda()
        return SwapReport(left, came, clock() - start, overlapped=False)
    left, first, rest = leaves.result(), comes.result(), arriving.cuda()
    came = MoveReport(
        first.bytes + rest.bytes,
        first.seconds + rest.seconds,
        first.fragmentation_before,
        rest.fragmentation_after,
    )
    return SwapReport(left, came, clock() - start, overlapped=True)


def _can_overlap(leaving: Engine, arriving: Engine) -> bool:
    return (
        all(engine.gradual_moves and not engine.leased for engine in (leaving, arriving))
        and leaving.residency is Residency.DEVICE
        and arriving.residency is Residency.HOST
    )
