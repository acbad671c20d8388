"""What is left of a group of ranks after a call that did not end well on all of them."""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any

from rlix.flow.workers.group import WorkerGroup
from rlix.protocol.errors import WaitTimeoutError, WorkerError

logger = logging.getLogger(__name__)

Begun = Mapping[tuple[int, ...], Sequence[int]]
"""By members, how many collectives one rank has begun in each of its process groups."""


@dataclass(frozen=True, slots=True)
class Evacuated:
    """Ray's references to what each rank handed over (`Handover`), which the calling process owns.

    `agree`: no rank, or each as often as the others, has written to its parameters during the last call.
    """

    parts: tuple[Any, ...]
    agree: bool


def in_step(begun: Sequence[Begun]) -> bool:
    """Whether all members of each process group have begun as many collectives in it; `begun` is by rank."""
    groups = {members for of_rank in begun for members in of_rank}
    return all(len({tuple(begun[rank].get(members, ())) for rank in members}) == 1 for members in groups)


def settled(group: WorkerGroup, timeout_s: float) -> bool:
    """Whether within `timeout_s` every rank has ended its calls, no collective of them left half-done."""
    try:
        standing: list[tuple[Begun, bool]] = group.run("collectives", timeout_s=timeout_s)
    except (WaitTimeoutError, WorkerError):
        return False
    return all(drained for _, drained in standing) and in_step([begun for begun, _ in standing])


def evacuate(group: WorkerGroup, timeout_s: float) -> Evacuated | None:
    """Have every rank hand over what it holds, and end it; None when one did not within `timeout_s`, or is dead.

    A rank that waits for others in a collective comes back when their processes end: so each is ended as soon as it
    has handed over.
    """
    group.call("abort")
    parts = group.call("hand_over")
    handed = [ref.future() for ref in parts]
    changes = [ref.future() for ref in group.call("changes")]  # ends after the former
    waiting = dict(zip(changes, range(len(changes)), strict=True))
    deadline = time.monotonic() + timeout_s
    while waiting:
        ended, _ = wait(waiting, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        if not ended:
            return None
        for future in ended:
            rank = waiting.pop(future)
            if error := future.exception() or handed[rank].exception():
                logger.error("%s: rank %d could not hand over its state: %s", group.name, rank, error)
                return None
            group.kill(rank)
    return Evacuated(tuple(parts), len({future.result() for future in changes}) == 1)
