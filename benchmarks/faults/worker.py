"""Processes that keep no bytes but behave as if: they hold device locks, and witness that they are alone."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from rlix.node.device_lock import DeviceLocks
from rlix.protocol.errors import DeviceBusyError, StaleEpochError
from rlix.protocol.messages import Fence

HUNG_S = 240.0  # how long a worker whose program died stays, with its lock, unless somebody ends it
LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Hold:
    keys: tuple[str, ...]
    fence: Fence


@dataclass(frozen=True, slots=True)
class Work:
    item: Any
    seconds: float


class Witness:
    """A file per device, that exists while a process uses it: what the device locks are checked by."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def using(self, keys: Sequence[str], epoch: int) -> Iterator[None]:
        for key in keys:
            self._enter(key, epoch)
        try:
            yield
        finally:
            for key in keys:
                (self.folder / key / str(os.getpid())).unlink(missing_ok=True)

    def _enter(self, key: str, epoch: int) -> None:
        folder = self.folder / key
        folder.mkdir(exist_ok=True)
        (folder / str(os.getpid())).write_text(str(epoch))
        for other in folder.iterdir():
            with contextlib.suppress(FileNotFoundError, ValueError):
                if int(other.name) != os.getpid() and int(other.read_text()) != epoch and _lives(int(other.name)):
                    text = f"{key}: process {other.name} (epoch {other.read_text()}) and {os.getpid()} (epoch {epoch})"
                    self.violation("two users", text)

    def violation(self, kind: str, text: str) -> None:
        with (self.folder / "violations.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), "kind": kind, "text": text}) + "\n")

    def violations(self) -> list[str]:
        path = self.folder / "violations.jsonl"
        return path.read_text().splitlines() if path.exists() else []


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def worker(orders: Connection, folder: Path) -> None:
    """Does as told over the pipe: `Hold`, `Work` and "free"; each is answered. Notices nothing while it works."""
    witness = Witness(folder)
    order: Any = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            if not isinstance(order, Hold):
                order = orders.recv()
                continue
            locks = DeviceLocks(order.keys)
            try:
                locks.acquire(order.fence, LOCK_TIMEOUT_S)
            except (DeviceBusyError, StaleEpochError) as error:
                orders.send(("busy", order.fence.epoch, str(error)))
                order = None
                continue
            with witness.using(order.keys, order.fence.epoch):
                orders.send(("holds", order.fence.epoch, ""))
                try:
                    while isinstance(order := orders.recv(), Work):
                        time.sleep(order.seconds)
                        orders.send(("done", 0, order.item))
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    time.sleep(HUNG_S)  # as in a kernel that does not end: the control plane has to end it
                    return
            locks.release()
            orders.send(("free", 0, ""))


def squat(key: str, seconds: float, ready: Any) -> None:
    """A standalone process, of no pool, that uses a device."""
    locks = DeviceLocks([key])
    locks.acquire(Fence("standalone", 0, "a standalone engine"), LOCK_TIMEOUT_S)
    ready.set()
    time.sleep(seconds)
    locks.release()
