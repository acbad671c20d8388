"""What a machine can tell the control plane about its devices and processes, and do about them."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlix.node import device_lock, process
from rlix.node.device_lock import LockRecord
from rlix.node.memory import HostMemory, host_memory
from rlix.protocol.messages import Device, Process

logger = logging.getLogger(__name__)


class Node:
    """One machine. Every answer is immediate, but for `kill`, which waits for what it ends.

    Args:
        lock_directory: of the device locks; default: this machine's.
    """

    def __init__(self, node_id: str, lock_directory: Path | None = None) -> None:
        self.node_id = node_id
        self._locks = lock_directory or device_lock.lock_directory()

    def holders(self, devices: Sequence[Device]) -> dict[int, LockRecord]:
        """Who has bytes on which of these devices now, by device id; those that nobody has are left out."""
        found = ((device.id, device_lock.holder(device.key, self._locks, self.node_id)) for device in devices)
        return {id: record for id, record in found if record is not None}

    def newest_epoch(self, devices: Iterable[Device], pool: str) -> int:
        """The newest epoch under which a pool has used any of these devices; 0: under none."""
        return max((device_lock.newest_epoch(device.key, pool, self._locks) for device in devices), default=0)

    def states(self, processes: Iterable[Process]) -> dict[Process, process.State]:
        return {each: process.state(each) for each in processes}

    def memory(self, processes: Iterable[Process]) -> HostMemory:
        """What the machine has, and what the processes use of it."""
        return host_memory(processes)

    def kill(
        self, processes: Iterable[Process], timeout_s: float, why: str = "", devices: Sequence[Device] = ()
    ) -> tuple[Process, ...]:
        """End processes (see `process.kill`); returns those that still live after `timeout_s`.

        Anybody may have named them, so the node looks for itself: given devices, only those are ended that have the
        lock of one of them open; otherwise only those of this node's own user.
        """
        asked = tuple(processes)
        lockers = {each for record in self.holders(devices).values() for each in record.processes}
        proven = [each for each in asked if (each in lockers if devices else process.is_ours(each))]
        spared = tuple(each for each in asked if each not in proven and process.alive(each))
        if spared:
            lack = "has the devices' locks open" if devices else "belongs to this user"
            logger.warning("not ended, because none of them %s: %s", lack, spared)
        return (*spared, *process.kill(proven, timeout_s, why))
