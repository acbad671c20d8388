"""What runs on devices: the base class of workers, and what each of them knows about its place in the group."""

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.experimental import internal_kv

from rlix.node import output, process
from rlix.node.addresses import host_name, name_interface
from rlix.node.device_lock import DeviceLocks
from rlix.protocol.errors import RlixError, WaitTimeoutError
from rlix.protocol.messages import Device, DeviceKind, Fence, Process

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

WORKER_ENVIRONMENT = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # or Ray hides every GPU from an actor that asks for none
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # what workers print ends up in the terminal of whoever started the job
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
"""Of every process of a job, so that all can be forked from one server."""
CONTROL = "control"
"""Concurrency group of methods that are answered while another method runs, even where methods run one at a time."""
LOCK_TIMEOUT_S = 5.0
"""For a device that is ours by now: for whoever had it to be gone."""
MEETING_TIMEOUT_S = 60.0
"""For the ranks of a group on several hosts to find each other; then it is said who waits for whom."""
_STORE_NAMESPACE = b"rlix_rendezvous"
_stores: "dict[str, Store]" = {}
"""By group: torch keeps what a store of Python's is made of, but not its methods."""
_NAME_LENGTH = 100  # of a program's command line, in messages
_POOL = "pool"  # of leases that are named by their epoch only


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's place in its group.

    `rendezvous` is a folder when the whole group is on one node, else None; `group_id` is unique to one group's life.
    `owner` is the program that made the group: under its fence are devices used that no lease is held for.
    `namespace` is Ray's in which the group's workers have their names; None: the program's. `output` is the file that
    what they print goes to; None: wherever Ray puts it.
    """

    group: str
    group_id: str
    rank: int
    world_size: int
    devices: tuple[Device, ...]
    cpu_threads: int
    rendezvous: str | None
    owner: Fence
    namespace: str | None = None
    output: str | None = None

    def device_locks(self) -> DeviceLocks:
        """The locks of this worker's devices, not held."""
        return DeviceLocks([_key(device) for device in self.devices])

    def fence(self, lease: Fence | int | None) -> Fence:
        """Whose a worker's bytes are: a lease's (its fence, or its epoch), or without one the program's."""
        if lease is None:
            return self.owner
        return lease if isinstance(lease, Fence) else Fence(_POOL, lease, self.owner.job, self.group)

    @property
    def kind(self) -> DeviceKind:
        return self.devices[0].kind if self.devices else DeviceKind.CPU

    def init_process_group(
        self,
        backend: str | None = None,
        *,
        tag: str = "world",
        ranks: Sequence[int] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Make `torch.distributed`'s default group out of `ranks` (default: all), each of which calls this.

        A group made again, after a restart or with other ranks, needs a `tag` not used before.

        Args:
            backend: as in torch; default: gloo for tensors in host memory, and NCCL for those on CUDA devices.

        Raises:
            WaitTimeoutError: the first rank did not announce itself within a minute (or `timeout_s`).
            RlixError: a host of the group cannot reach another one; names both.
        """
        import torch.distributed as dist

        members = list(range(self.world_size)) if ranks is None else list(ranks)
        store = self._store(tag, members, timeout_s)
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if self.kind is DeviceKind.CUDA else "gloo"),
            store=store,
            rank=members.index(self.rank),
            world_size=len(members),
            timeout=timedelta(seconds=timeout_s),
        )

    def _store(self, tag: str, members: list[int], timeout_s: float) -> "Store":
        import torch.distributed as dist

        if self.rendezvous is not None:
            return dist.FileStore(f"{self.rendezvous}/{tag}", len(members))  # type: ignore[attr-defined]
        from rlix.workers.store import GroupStore, StoreServer, check_reachable

        if len(members) == 1:
            return dist.HashStore()  # type: ignore[attr-defined]
        key, address = f"{self.group_id}/{tag}".encode(), ray.util.get_node_ip_address()
        patience_s, secret = min(timeout_s, MEETING_TIMEOUT_S), self.group_id
        server = None
        if self.rank == members[0]:
            server = StoreServer(address, secret)
            internal_kv._internal_kv_put(key, f"{address} {server.port}".encode(), namespace=_STORE_NAMESPACE)
        host, port = self._await_address(key, members[0], patience_s).split()
        try:
            store = GroupStore((host, int(port)), secret, timeout_s, patience_s)
            check_reachable(store, members.index(self.rank), len(members), host_name(), address, patience_s)
        except RlixError as error:
            raise RlixError(f"{self.group}: rank {self.rank}: {error}") from None
        _stores[self.group_id] = store
        if server is not None:  # everybody is here
            weakref.finalize(store, server.close)
            internal_kv._internal_kv_del(key, namespace=_STORE_NAMESPACE)
        return store

    def _await_address(self, key: bytes, leader: int, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            address = internal_kv._internal_kv_get(key, namespace=_STORE_NAMESPACE)
            if address is not None:
                return str(address.decode())
            time.sleep(0.02)
        raise WaitTimeoutError(
            f"{self.group}: rank {self.rank} waited {timeout_s:g} s for rank {leader} to announce the process group"
        )


class Worker:
    """Base class of everything that runs on a device. `WorkerGroup` sets `ctx` before `__init__` runs."""

    ctx: WorkerContext

    def close(self) -> None:
        """Called once when the group closes. Override to end child processes and the like; bounded by the group."""


def prepare_process(ctx: WorkerContext) -> None:
    """Show this process the worker's devices and no others, before anything touches CUDA."""
    if ctx.output is not None:
        with contextlib.suppress(OSError):  # on a node that does not have the job's folder
            output.to_file(Path(ctx.output), bounded=False)
            library = logging.getLogger("rlix")
            if not library.handlers:
                library.addHandler(logging.StreamHandler(output.terminal()))
    cuda = ctx.kind is DeviceKind.CUDA
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_cuda_name(device) for device in ctx.devices) if cuda else ""
    if ctx.rendezvous is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: independent of how its name resolves
    elif ctx.world_size > 1:
        name_interface(ray.util.get_node_ip_address())
    if not cuda:
        import torch

        torch.set_num_threads(ctx.cpu_threads)


def program_fence() -> Fence:
    """The fence under which this program's engines share devices while they hold no lease."""
    return _fence_of(process.this_process())


@cache
def _fence_of(me: Process) -> Fence:
    """One and the same for a process, whose title may change while it runs."""
    known = process.describe(me.pid)
    name = known.name if known is not None else "a program"
    return Fence(f"program:{os.uname().nodename}:{me.pid}:{me.started}", 0, f"{name[:_NAME_LENGTH]} (pid {me.pid})")


def _key(device: Device) -> str:
    return device.key or f"{device.kind}-{device.node_id[:12]}-{device.index}"


def _cuda_name(device: Device) -> str:
    """A GPU's UUID, which means the same whatever is visible to this process; where it is not known, its number."""
    return device.key if device.key.startswith(("GPU-", "MIG-")) else str(device.index)
