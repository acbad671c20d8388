"""Leases of a trainer of several ranks: rank 0 asks for them, the others wait at a store on the CPU.

A collective would not do: ranks that wait inside one keep their devices busy, and it times out.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rlix.integrations.leases import Gate
from rlix.protocol.errors import RlixError, WaitTimeoutError
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 300.0  # for the other ranks to have moved their bytes away
_POLL_S = 0.01
_DESK_POLL_S = 0.1
_LEFT = "left"  # the key that says that rank 0 has left the pool


class RankGate:
    """Of one rank. All go in and out together; but for what one does alone, as rank 0 when it saves.

    Args:
        store: a torch.distributed store that all ranks use.
        inner: rank 0's gate; None for the others.
        desk: rank 0's, of what one rank does alone; None for the others.
    """

    def __init__(self, rank: int, world_size: int, store: Any, inner: Gate | None, desk: "Desk | None" = None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._inner = inner
        self._desk = desk
        self._number = 0
        self._visit = 0  # how often it was let in alone
        self._alone = False

    def enter(self, phase: Phase, *, alone: bool = False) -> tuple[int, ...]:
        self._alone = alone
        if alone:
            return self._enter_alone(phase)
        self._number += 1
        key = f"{self._number}/granted"
        if self._inner is None:
            granted = json.loads(self._await(key))
            if "error" in granted:
                raise RlixError(f"rank 0 got no lease: {granted['error']}")
            if granted["phase"] != phase.name:
                raise RlixError(
                    f"rank {self._rank} is about to do {phase.name} while rank 0 does {granted['phase']}: every rank "
                    "must generate, train and evaluate together"
                )
            return tuple(granted["devices"])
        try:
            devices = self._inner.enter(phase)
        except BaseException as error:  # raised again; the others would wait for ever
            self._store.set(key, json.dumps({"error": str(error)}))
            raise
        self._store.set(key, json.dumps({"phase": phase.name, "devices": devices}))
        return devices

    def leave(self) -> None:
        if self._alone:
            self._leave_alone()
            return
        if self._inner is None:
            self._store.set(f"{self._number}/gone/{self._rank}", "")
            return
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        left = list(range(1, self._world_size))
        while left := [rank for rank in left if not self._store.check([f"{self._number}/gone/{rank}"])]:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"ranks {left} have not moved their bytes away within {LEAVE_TIMEOUT_S:.0f} s; rank 0 keeps the "
                    "lease until the program ends"
                )
            time.sleep(_POLL_S)
        for key in ("granted", *(f"gone/{rank}" for rank in range(1, self._world_size))):
            self._store.delete_key(f"{self._number}/{key}")
        self._inner.leave()

    def _enter_alone(self, phase: Phase) -> tuple[int, ...]:
        if self._desk is not None:
            return self._desk.let_in(self._rank, phase)
        self._visit += 1
        key = _visit(self._rank, self._visit)
        self._store.set(f"{key}/wanted", phase.name)
        granted = json.loads(self._await(f"{key}/granted"))
        if "error" in granted:
            raise RlixError(f"rank 0 got no lease for rank {self._rank}: {granted['error']}")
        return tuple(granted["devices"])

    def _leave_alone(self) -> None:
        if self._desk is not None:
            self._desk.let_out(self._rank)
        else:
            self._store.set(f"{_visit(self._rank, self._visit)}/gone", "")

    def _await(self, key: str) -> str:
        """Standing in the queue is no error; when rank 0 dies, whoever started the ranks ends the others."""
        while not self._store.check([key]):
            if self._store.check([_LEFT]):
                raise RlixError(f"rank {self._rank} gets no lease: rank 0 has left the pool")
            time.sleep(_POLL_S)
        return str(self._store.get(key).decode())


class Desk:
    """Rank 0's thread that asks for what single ranks do alone: one lease, as long as any of them is at it."""

    def __init__(self, world_size: int, store: Any, gate: Gate) -> None:
        """`gate` is the desk's alone."""
        self._store = store
        self._gate = gate
        self._world_size = world_size
        self._inside: set[int] = set()
        self._devices: tuple[int, ...] = ()
        self._door = threading.Lock()
        self._visits = dict.fromkeys(range(1, world_size), 1)
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="ranks' leases", daemon=True).start()

    def let_in(self, rank: int, phase: Phase) -> tuple[int, ...]:
        """Waits for the devices; returns them."""
        with self._door:
            if not self._inside:
                self._devices = self._gate.enter(phase)
            self._inside.add(rank)
            return self._devices

    def let_out(self, rank: int) -> None:
        with self._door:
            self._inside.discard(rank)
            if not self._inside:
                self._gate.leave()

    def close(self, gone: Callable[[int], bool], timeout_s: float) -> None:
        """Rank 0 ends: goes on until the others have ended, too, or are `gone`, for so long."""
        deadline = time.monotonic() + timeout_s
        left = list(range(1, self._world_size))
        while left := [rank for rank in left if not (self._store.check([_ended(rank)]) or gone(rank))]:
            if time.monotonic() > deadline:
                logger.warning("ranks %s go on without the pool: rank 0 has ended", left)
                break
            time.sleep(_DESK_POLL_S)
        self._closed.set()
        self._store.set(_LEFT, "")

    def _serve(self) -> None:
        while not self._closed.wait(_DESK_POLL_S):
            for rank, number in list(self._visits.items()):
                key = _visit(rank, number)
                if rank not in self._inside and self._store.check([f"{key}/wanted"]):
                    self._store.set(f"{key}/granted", json.dumps(self._granted(rank, self._store.get(f"{key}/wanted"))))
                elif rank in self._inside and self._store.check([f"{key}/gone"]):
                    self._visits[rank] += 1
                    self.let_out(rank)

    def _granted(self, rank: int, wanted: bytes) -> dict[str, object]:
        try:
            return {"devices": self.let_in(rank, Phase[wanted.decode()])}
        except RlixError as error:
            self._visits[rank] += 1
            return {"error": str(error)}


def say_ended(store: Any, rank: int) -> None:
    """Another rank than the first is about to end."""
    store.set(_ended(rank), "")


def _visit(rank: int, number: int) -> str:
    return f"alone/{rank}/{number}"


def _ended(rank: int) -> str:
    return f"ended/{rank}"
