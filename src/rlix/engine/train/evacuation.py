"""What is left of a group of ranks after a call that did not end well on all of them."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from rlix.flow.worker_group import WorkerGroup
from rlix.protocol.errors import WaitTimeoutError, WorkerError

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
    parts, changes = group.call("hand_over"), group.call("changes")
    futures = {ref.future(): rank for rank, ref in enumerate(changes)}  # the later of the two calls
    deadline = time.monotonic() + timeout_s
    while futures:
        ended, _ = wait(futures, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        if not ended:
            return None
        for future in ended:
            if future.exception() is not None or parts[futures[future]].future().exception() is not None:
                return None
            group.kill(futures.pop(future))
    try:
        changed = ray.get(changes)
    except RayError:
        return None
    return Evacuated(tuple(parts), len(set(changed)) == 1)
