"""Weights from device to device: one sender, any number of receivers, one bucket of bytes after the other.

The sides meet in a store that the process which asked for the transfer keeps (see `weight_sync`). Everyone says there
that it is ready, receivers after they have checked what will come, and the first byte is sent when all are: whoever
refuses stops all. From then on receivers on the sender's own GPU map each bucket (CUDA IPC), and all others take part
in a broadcast of a process group of their own, which exists for one transfer: NCCL on GPUs, gloo on virtual ones.
"""

import ast
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Self

import torch

from rlix.protocol.errors import RlixError, WaitTimeoutError, WeightSyncError

DeviceTransport = Literal["ipc", "broadcast"]

FAILED = "failed"
"""Key of the store, set when one side failed: the reason, for all who still wait."""

_POLL_S = 0.0005


class TransferError(RlixError):
    """A transfer broke off in the middle: some tensors of a receiver may be new and some old."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the sides of one transfer meet, and how the bytes reach each receiver.

    Attributes:
        name: of the receiving engine.
        transports: of each replica's receivers; vLLM has one on each device, transformers one for each replica.
        timeout_s: longest that one side waits for another.
        replica, worker: which receiver it is that holds this.
    """

    name: str
    host: str
    port: int
    transports: tuple[tuple[DeviceTransport, ...], ...]
    timeout_s: float
    replica: int = 0
    worker: int = 0

    @property
    def receivers(self) -> tuple[DeviceTransport, ...]:
        """Of all replicas, in order. As a member of the transfer, receiver i is number i + 1: the sender is 0."""
        return tuple(transport for replica in self.transports for transport in replica)

    @property
    def member(self) -> int:
        return sum(map(len, self.transports[: self.replica])) + self.worker + 1

    def at(self, replica: int | None, worker: int | None) -> "Rendezvous":
        """For another receiver; None leaves the number as it is."""
        return replace(
            self,
            replica=self.replica if replica is None else replica,
            worker=self.worker if worker is None else worker,
        )

    def called(self, member: int) -> str:
        """What errors call a member of the transfer."""
        if member == 0:
            return "training rank 0"
        names = [(replica, worker) for replica, row in enumerate(self.transports) for worker in range(len(row))]
        replica, worker = names[member - 1]
        return f"{self.name}, replica {replica}" + (f", worker {worker}" if len(self.transports[replica]) > 1 else "")


class _Member:
    """One end of a transfer: joins it, and leaves it as a context manager."""

    def __init__(self, meeting: Rendezvous, member: int, device: torch.device) -> None:
        self._meeting, self._me, self._device = meeting, member, device
        self._store: Any = None
        self._group: Any = None
        self._buckets = 0

    def _ready(self) -> None:
        if self._store is None:
            self.join()

    def join(self) -> None:
        """Wait until all members are ready, then open the group.

        Raises:
            WeightSyncError: somebody refused, and nothing was changed anywhere.
            WaitTimeoutError: somebody did not come; names whom.
        """
        meeting = self._meeting
        everyone = range(len(meeting.receivers) + 1)
        try:
            self._store = open_store(meeting.host, meeting.port, meeting.timeout_s)
            self._say("ready")
            self._await("ready", everyone)
        except RuntimeError as error:
            if isinstance(error, RlixError) and not isinstance(error, TransferError):
                raise  # it says itself who did not come
            raise WeightSyncError(f"weights were not sent, and nothing was changed: {error}") from error
        members = [0, *(m for m in everyone[1:] if meeting.receivers[m - 1] == "broadcast")]
        if len(members) > 1 and self._me in members:
            with self._named("open the group"):
                place = (members.index(self._me), len(members))
                self._group = _open_group(self._device, meeting, self._store, *place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None and kind is None:
            group.shutdown()
        elif group is not None:
            group.abort()  # with gloo, who still waits for this member learns at once that it has gone

    def _broadcast(self, data: torch.Tensor) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([data], options).wait(timedelta(seconds=self._meeting.timeout_s))

    def _say(self, what: str) -> None:
        self._store.set(f"{what}/{self._me}", "yes")

    def _await(self, what: str, members: Sequence[int]) -> None:
        """Until each of these members has said it."""
        self._await_keys({f"{what}/{member}": self._meeting.called(member) for member in members}, what)

    def _await_keys(self, keys: dict[str, str], what: str) -> None:
        """Until these keys are in the store; the values say on whom that depends."""
        deadline = time.monotonic() + self._meeting.timeout_s
        while not self._store.check(list(keys)):
            if self._store.check([FAILED]):
                raise TransferError(self._store.get(FAILED).decode())
            if time.monotonic() > deadline:
                late = [who for key, who in keys.items() if not self._store.check([key])]
                raise WaitTimeoutError(
                    f"{self._meeting.called(self._me)} waited {self._meeting.timeout_s:g} s for {'; '.join(late)} "
                    f"to say {what!r}"
                )
            time.sleep(_POLL_S)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RlixError:
            raise
        except RuntimeError as error:  # what torch.distributed raises, whatever happened
            me, limit = self._meeting.called(self._me), self._meeting.timeout_s
            raise TransferError(f"{me} could not {what} (timeout {limit:g} s): {error}") from error


class Sender(_Member):
    """Training rank 0. Joins with its first bucket."""

    def __init__(self, meeting: Rendezvous, device: torch.device) -> None:
        super().__init__(meeting, 0, device)
        self._beside = [i + 1 for i, transport in enumerate(meeting.receivers) if transport == "ipc"]

    def send(self, data: torch.Tensor) -> None:
        """Returns when `data` may be written to again.

        Raises:
            As `join`, and TransferError: a receiver has gone, or the bytes did not pass in time.
        """
        self._ready()
        with self._named(f"send bucket {self._buckets}"):
            if self._group is not None:
                self._broadcast(data)
            if self._beside:
                lent = data.clone()  # sharing concerns whole allocations, and the module's are nobody else's business
                self._store.set(f"bucket/{self._buckets}", share(lent))
                self._await(f"taken {self._buckets}", self._beside)
        self._buckets += 1

    def finish(self) -> None:
        """Wait until every receiver has all of it in place."""
        self._ready()
        with self._named("learn that all is in place"):
            self._await("done", range(1, len(self._meeting.receivers) + 1))


class Receiver(_Member):
    """One process that holds a replica's weights, or its part of them. Joining says that it will take what comes."""

    def __init__(self, meeting: Rendezvous, device: torch.device) -> None:
        super().__init__(meeting, meeting.member, device)
        self._beside = meeting.receivers[self._me - 1] == "ipc"

    def receive(self, size: int) -> torch.Tensor:
        """The next bucket's bytes, on the device, in memory that belongs to the caller.

        Raises:
            As `join`, and TransferError: the sender has gone, or the bytes did not come in time.
        """
        self._ready()
        with self._named(f"receive bucket {self._buckets}"):
            if not self._beside:
                data = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._broadcast(data)
            else:
                key = f"bucket/{self._buckets}"
                self._await_keys({key: self._meeting.called(0)}, key)
                data = opened(self._store.get(key), self._device).clone()
                _synchronize(self._device)  # before the sender reuses the memory
                self._say(f"taken {self._buckets}")
        self._buckets += 1
        return data

    def finish(self) -> None:
        """Tell the sender that every byte is in place."""
        self._ready()
        with self._named("say that all is in place"):
            _synchronize(self._device)
            self._say("done")


def share(data: torch.Tensor) -> str:
    """A handle on a tensor's whole storage for other processes on its GPU; the storage must outlive their use."""
    # Numbers and bytes only, so that the text is read back without running anything, which a pickle would.
    return repr(data.untyped_storage()._share_cuda_())


def opened(handle: bytes, device: torch.device) -> torch.Tensor:
    """The bytes behind a handle, in the sharing process's memory."""
    _, *shared = ast.literal_eval(handle.decode())
    # The GPU's number may differ between the two processes: each sees a selection of its own.
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *shared)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def open_store(host: str, port: int, timeout_s: float, *, server: bool = False) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, server, timeout, wait_for_workers=False)  # type: ignore[attr-defined]


def _open_group(device: torch.device, meeting: Rendezvous, store: Any, rank: int, size: int) -> Any:
    """A process group that `torch.distributed` knows nothing of, so that no other group is in its way."""
    from torch import distributed

    dist: Any = distributed  # a build without CUDA has no ProcessGroupNCCL
    store = dist.PrefixStore("group", store)
    timeout = timedelta(seconds=meeting.timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # when it expires NCCL's watchdog ends the process: ours is to come first
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((meeting.host, meeting.port))
        mine = probe.getsockname()[0]  # of this node's addresses the one by which it reaches the others
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=mine)]
    return dist.ProcessGroupGloo(store, rank, size, options)
