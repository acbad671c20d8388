"""What is left of a group of ranks after a call that did not end well on all of them."""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rlix.protocol.errors import WaitTimeoutError, WorkerError
from rlix.protocol.messages import DeviceKind
from rlix.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

Begun = Mapping[tuple[int, ...], Sequence[int]]
"""By members, how many collectives one rank has begun in each of its process groups."""
_LIFE_SIGN_S = 5.0  # within which a rank that has ended is known to have
_PAUSE_S = 0.2  # before one is asked again
_DRAIN_S = 1.0  # for what a device was given to do before a call failed


@dataclass(frozen=True, slots=True)
class Evacuated:
    """Ray's references to what each rank handed over (`Handover`), which the calling process owns; None: it was dead.

    `agree`: no rank, or each as often as the others, has written to its parameters during the calls under way; none at
    all where one did not come back from them.
    """

    parts: tuple[Any, ...]
    agree: bool

    @property
    def lost(self) -> list[int]:
        """Ranks of whose parts others hold copies."""
        return [rank for rank, part in enumerate(self.parts) if part is None]


def standing(kind: DeviceKind) -> tuple[Begun, bool]:
    """Of this process, a rank: the collectives it has begun, and whether its device is through."""
    begun: dict[tuple[int, ...], list[int]] = {}
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    for group in groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        begun.setdefault(ranks, []).append(group._get_sequence_number_for_group())
    if kind is not DeviceKind.CUDA:
        return begun, True
    deadline = time.monotonic() + _DRAIN_S
    while not (drained := torch.cuda.current_stream().query()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return begun, drained


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


def evacuate(group: WorkerGroup, settle_s: float, hand_over_s: float, *, since: int, copies: bool) -> Evacuated | None:
    """Have every rank hand over what it holds, and end it; None when one cannot.

    `since`: the first of the calls that are under way. `copies`: whether every part is held by more than one rank, so
    that those of dead ones are handed over by others.

    A rank that waits for others in a collective comes back when their processes end: so each is ended as soon as it
    has handed over. Of those that do not come back within `settle_s` it is taken while they hang, within `hand_over_s`.
    """
    group.call("abort")
    everyone = range(group.world_size)
    lost = dead(group, settle_s)
    living = [rank for rank in everyone if rank not in lost]
    if lost and not (copies and living):
        return None
    found = _handed_over(group, living, since, lost, settle_s, at_once=False)
    if hanging := [rank for rank in living if rank not in found]:
        found |= _handed_over(group, hanging, since, lost, hand_over_s, at_once=True)
    if len(found) < len(living):
        return None
    written = {count for _, count in found.values()}
    agree = written == {0} if hanging or lost else len(written) == 1
    return Evacuated(tuple(found[rank][0] if rank in found else None for rank in everyone), agree)


def dead(group: WorkerGroup, timeout_s: float) -> list[int]:
    """Ranks that have ended. One whose connection is lost is asked again, as its host may only be cut off.

    It ends when each of those answers or is known to have ended, at the latest after `timeout_s`; whoever says nothing
    at all is waited for no longer than a life sign takes.
    """
    deadline = time.monotonic() + timeout_s
    lost, asked = list[int](), list(range(group.world_size))
    while asked:
        futures = [ref.future() for ref in group.submit("ping", ranks=asked, at_once=True)]
        ended, _ = wait(futures, timeout=min(_LIFE_SIGN_S, max(0.0, deadline - time.monotonic())))
        errors = {rank: f.exception() for rank, f in zip(asked, futures, strict=True) if f in ended}
        asked = [rank for rank, error in errors.items() if isinstance(error, ActorUnavailableError)]
        proven = [rank for rank in asked if group.has_ended(rank, _PAUSE_S)]
        lost += proven + [rank for rank, error in errors.items() if isinstance(error, ActorDiedError)]
        asked = [rank for rank in asked if rank not in proven]
        if time.monotonic() >= deadline:
            break
    return sorted(lost)


def _handed_over(
    group: WorkerGroup, ranks: Sequence[int], since: int, lost: Sequence[int], timeout_s: float, *, at_once: bool
) -> dict[int, tuple[Any, int]]:
    """By rank, what those hand over that can, and how often they have written to their parameters; they are ended."""
    handed = group.submit("hand_over", kwargs={"undo": since, "lost": lost}, ranks=ranks, at_once=at_once)
    parts = dict(zip(ranks, handed, strict=True))
    changes = group.submit("changes", (since,), ranks=ranks, at_once=at_once)  # ends after the former
    waiting = {ref.future(): rank for rank, ref in zip(ranks, changes, strict=True)}
    found: dict[int, tuple[Any, int]] = {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ended, _ = wait(waiting, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        if not ended:
            break
        for future in ended:
            rank = waiting.pop(future)
            if error := future.exception() or parts[rank].future().exception():
                logger.error("%s: rank %d could not hand over its state: %s", group.name, rank, error)
                continue
            found[rank] = parts[rank], future.result()
            try:
                group.kill(rank)
            except WaitTimeoutError as late:  # those who take its place find out whether its device is free
                logger.error("%s", late)
    return found
