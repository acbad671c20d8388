"""Judges exclusion from outside: the journal's events, folded by rules of its own, against the kernel's locks."""

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlix.control.journal import decode
from rlix.node.device_lock import LockRecord
from rlix.protocol.events import (
    CountersKept,
    DevicesDiscovered,
    DevicesReleased,
    DrainStarted,
    Event,
    GrantRevoked,
    LeaseGranted,
    LeaseKept,
    LeaseQuarantined,
    LeaseReleased,
    PipelineEnding,
)
from rlix.protocol.messages import Device, Lease, LeaseState, LeaseStatus

_EVERY_S = 0.02
_SLACK_S = 0.3  # between a lock that is seen and its release's way into the journal

Entry = tuple[float, Event]


class Ledger:
    """Which lease has which device, by the events alone; `double` are the grants that broke the rule."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.holder: dict[int, int] = {}
        self.next: dict[int, int] = {}
        self.draining: set[int] = set()
        self.double: list[str] = []
        self.last_epoch = 0

    def apply(self, event: Event) -> None:
        match event:
            case LeaseGranted(lease):
                self._grant(lease)
            case DrainStarted(epoch) | LeaseQuarantined(epoch):
                self.draining.add(epoch)
            case DevicesReleased(epoch, devices):
                self._shrink(epoch, devices)
            case LeaseReleased(epoch) | GrantRevoked(epoch):
                self._end(epoch)
            case PipelineEnding(pipeline_id):
                for lease in [lease for lease in self.leases.values() if lease.pipeline_id == pipeline_id]:
                    if lease.epoch in self.holder.values():
                        self.draining.add(lease.epoch)
                    else:  # it never began
                        self._end(lease.epoch)

    def resume(self, kept: Sequence[LeaseStatus]) -> None:
        """The journal was compacted to these leases: of what happened before, some may not have been read."""
        for epoch in self.leases.keys() - {status.lease.epoch for status in kept}:
            self._end(epoch)
        for status in kept:
            lease, pending = status.lease, status.state is LeaseState.PENDING
            self.leases[lease.epoch] = lease
            for device in lease.devices:
                (self.next if pending else self.holder)[device] = lease.epoch
            if status.state in (LeaseState.DRAINING, LeaseState.QUARANTINED):
                self.draining.add(lease.epoch)
            self.last_epoch = max(self.last_epoch, lease.epoch)

    def _grant(self, lease: Lease) -> None:
        if lease.epoch <= self.last_epoch:
            self.double.append(f"epoch {lease.epoch} after {self.last_epoch}")
        self.last_epoch = max(self.last_epoch, lease.epoch)
        self.leases[lease.epoch] = lease
        for device in lease.devices:
            there = self.holder.get(device)
            if (there is not None and there not in self.draining) or device in self.next:
                self.double.append(f"device {device}: lease {lease.epoch} beside {there} and {self.next.get(device)}")
            self.next[device] = lease.epoch
        self._begin(lease)

    def _begin(self, lease: Lease) -> None:
        if all(device not in self.holder and self.next.get(device) == lease.epoch for device in lease.devices):
            for device in lease.devices:
                del self.next[device]
                self.holder[device] = lease.epoch

    def _shrink(self, epoch: int, devices: tuple[int, ...]) -> None:
        lease = self.leases.get(epoch)
        if lease is None or not set(devices) < set(lease.devices) or epoch in self.draining:
            self.double.append(f"lease {epoch} gave {devices} back, of {lease and lease.devices}")
            return
        self.leases[epoch] = replace(lease, devices=tuple(d for d in lease.devices if d not in devices))
        for device in devices:
            del self.holder[device]

    def _end(self, epoch: int) -> None:
        lease = self.leases.pop(epoch, None)
        if lease is None:
            self.double.append(f"lease {epoch} ended, which was not held")
            return
        self.draining.discard(epoch)
        for device in lease.devices:
            for held in (self.holder, self.next):
                if held.get(device) == epoch:
                    del held[device]
        for following in sorted({self.next[device] for device in lease.devices if device in self.next}):
            self._begin(self.leases[following])


class Watcher:
    """Follows the journal and the locks in a thread, until `close`.

    What is done on a device that has left the pool with its host is nobody's concern: it is granted to nobody.

    Args:
        look: who has bytes on a device.
        pool: its name in the locks.
    """

    def __init__(
        self, journal: Path, look: Callable[[Device], LockRecord | None], devices: tuple[Device, ...], pool: str
    ) -> None:
        self._path, self._look, self._pool = journal, look, pool
        self._devices = devices
        self._sequence = 0
        self.ledger = Ledger()
        self.violations: list[str] = []
        self.log: list[Entry] = []
        self.looks = 0
        self._ended: dict[tuple[int, int], float] = {}  # when a lease lost a device
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._read(self._connect())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def events_since(self, at: float) -> list[Entry]:
        """Events that were written at `at` (unix seconds) or later."""
        with self._changed:
            return [entry for entry in self.log if entry[0] >= at]

    def wait(self, at: float, wanted: Callable[[Event], bool], timeout_s: float) -> float | None:
        """When, in seconds after `at`, the first such event was written; None: not within `timeout_s`."""

        def found() -> float | None:
            return next((time_ - at for time_, event in self.log if time_ >= at and wanted(event)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None, timeout_s)
            return found()

    def active(self) -> dict[int, Lease]:
        """Leases that have their devices and are not being taken back."""
        with self._changed:
            epochs = set(self.ledger.holder.values()) - self.ledger.draining
            return {epoch: self.ledger.leases[epoch] for epoch in epochs}

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, check_same_thread=False, timeout=5)

    def _run(self) -> None:
        db = self._connect()
        while not self._stop.wait(_EVERY_S):
            before = time.time()
            seen = {device.id: self._look(device) for device in self._devices}
            try:
                self._read(db)
            except sqlite3.Error:
                continue
            self.looks += 1
            for id_, record in seen.items():
                if record is not None and record.fence.pool == self._pool:
                    self._check(id_, record.fence.epoch, before, str(record))

    def _read(self, db: sqlite3.Connection) -> None:
        rows = db.execute(
            "SELECT sequence, time, type, body FROM events WHERE sequence > ? ORDER BY sequence", (self._sequence,)
        ).fetchall()
        if not rows:
            return
        with self._changed:
            kept: list[LeaseStatus] = []
            for sequence, at, name, body in rows:
                self._sequence = sequence
                event = decode(name, body)
                if isinstance(event, LeaseKept):
                    kept.append(event.status)
                elif isinstance(event, CountersKept):  # the last of what a compacted journal begins with
                    self.ledger.resume(kept)
                if isinstance(event, LeaseReleased | DevicesReleased):
                    lease = self.ledger.leases.get(event.epoch)
                    for device in lease.devices if lease is not None else ():
                        if isinstance(event, LeaseReleased) or device in event.devices:
                            self._ended[event.epoch, device] = at
                self.ledger.apply(event)
                if isinstance(event, DevicesDiscovered):
                    self._devices = event.devices
                self.log.append((at, event))
            self._changed.notify_all()

    def _check(self, device: int, epoch: int, at: float, who: str) -> None:
        """Whoever has bytes on a device has its lease, or had it a moment ago."""
        allowed = {self.ledger.holder.get(device), self.ledger.next.get(device)}
        ended = self._ended.get((epoch, device))
        if device not in {known.id for known in self._devices}:
            return  # it left meanwhile
        if epoch in allowed or (ended is not None and at - ended < _SLACK_S):
            return
        self.violations.append(f"device {device} is used under epoch {epoch} ({who}), but leased to {allowed}")
