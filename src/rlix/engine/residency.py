"""Where an engine's bytes are: on its device, in host memory, or nowhere. The only code that moves them.

A `ResidentSet` moves whole *storages*, not tensors: a storage that leaves the device shrinks to zero bytes and grows
back when it returns, so every view of it (a parameter, the flat shard FSDP keeps of it, an optimizer's moments, tied
weights) keeps its identity and needs no patching. FSDP frees its all-gathered parameters the same way.

Two movers have the same life cycle, accounting and errors. `SwapMover` (CUDA) copies through pinned host buffers on a
side stream. `VirtualMover` (a virtual GPU) counts the bytes and leaves them: its device memory *is* host memory.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from rlix.protocol.errors import NotResidentError


class Residency(StrEnum):
    DEVICE = "device"
    HOST = "host"
    META = "meta"  # the bytes are gone; only names and shapes remain


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What one move cost. Fragmentation: the share of the allocator's reserved device memory that holds nothing."""

    bytes: int
    seconds: float
    fragmentation_before: float = 0.0
    fragmentation_after: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


class Mover(Protocol):
    """How the bytes of storages leave a device and come back."""

    def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
        """Free the storages' device memory; return for each what `restore` needs to bring it back."""
        ...

    def restore(self, storages: list[torch.UntypedStorage], copies: list[torch.Tensor | None]) -> None: ...

    def trim(self) -> None:
        """Give memory that holds nothing back to the device."""
        ...

    def fragmentation(self) -> float: ...


class VirtualMover:
    """A virtual GPU: nothing moves, because its memory is host memory."""

    def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
        return [None] * len(storages)

    def restore(self, storages: list[torch.UntypedStorage], copies: list[torch.Tensor | None]) -> None:
        pass

    def trim(self) -> None:
        pass

    def fragmentation(self) -> float:
        return 0.0


class SwapMover:
    """Copies storages to host buffers and back; on CUDA pinned buffers, kept for the next move, and a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._pool: dict[int, list[torch.Tensor]] = {}

    def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
        copies: list[torch.Tensor | None] = []
        with self._side_stream():
            for storage in storages:
                buffer = self._buffer(storage.nbytes())
                buffer.copy_(_as_bytes(storage), non_blocking=True)
                copies.append(buffer)
        self._wait()
        for storage in storages:
            storage.resize_(0)
        return copies

    def restore(self, storages: list[torch.UntypedStorage], copies: list[torch.Tensor | None]) -> None:
        for storage, buffer in zip(storages, copies, strict=True):
            assert buffer is not None
            storage.resize_(buffer.numel())  # on the current stream: its memory returns to the pool of that stream
        with self._side_stream():
            for storage, buffer in zip(storages, copies, strict=True):
                assert buffer is not None
                _as_bytes(storage).copy_(buffer, non_blocking=True)
        self._wait()
        for buffer in copies:
            assert buffer is not None
            self._pool.setdefault(buffer.numel(), []).append(buffer)

    def trim(self) -> None:
        if self._cuda:
            torch.cuda.empty_cache()

    def fragmentation(self) -> float:
        if not self._cuda:
            return 0.0
        reserved = torch.cuda.memory_reserved(self._device)
        return 1.0 - torch.cuda.memory_allocated(self._device) / reserved if reserved else 0.0

    def _buffer(self, size: int) -> torch.Tensor:
        spare = self._pool.get(size)
        return spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)

    def _side_stream(self) -> torch.cuda.StreamContext:
        # A stream of None makes the context do nothing, which is what the CPU needs.
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def mover_for(device: torch.device) -> Mover:
    """The mover of a device: real copies for a GPU, accounting only for a virtual one."""
    return SwapMover(device) if device.type == "cuda" else VirtualMover()


class ResidentSet:
    """A named set of tensors that moves as one: device <-> host, or to meta, where the bytes are dropped.

    `tensors` is asked at every move away, because gradients and optimizer state come and go. DTensors count with their
    local shard. Not thread-safe: nobody may use the tensors while they move.
    """

    def __init__(
        self,
        owner: str,
        tensors: Callable[[], Iterable[torch.Tensor]],
        device: torch.device,
        *,
        mover: Mover | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._owner = owner
        self._tensors = tensors
        self._device = device
        self._mover = mover or mover_for(device)
        self._clock = clock
        self._state = Residency.DEVICE
        self._away: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._copies: list[torch.Tensor | None] = []

    @property
    def state(self) -> Residency:
        return self._state

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device now; 0 when away."""
        return sum(s.nbytes() for s in self._storages()) if self._state is Residency.DEVICE else 0

    @property
    def host_bytes(self) -> int:
        """Bytes held in host memory to come back from; 0 on the device and on meta."""
        return sum(self._sizes) if self._state is Residency.HOST else 0

    def check(self) -> None:
        """Raise `NotResidentError` unless the bytes are on the device."""
        if self._state is not Residency.DEVICE:
            raise NotResidentError(
                f"{self._owner} was used while its bytes are on {self._state.value}, not on {self._device}; "
                "bring them back first with .cuda() (or load weights after .meta())"
            )

    def to_host(self) -> MoveReport:
        """Free the device memory and keep the bytes in host memory. Nothing happens when already there."""
        if self._state is Residency.HOST:
            return MoveReport(0, 0.0)
        self._refuse_meta("to host")
        return self._timed(self._evict, Residency.HOST)

    def to_device(self) -> MoveReport:
        """Bring the bytes back, equal to the bit. Nothing happens when already there."""
        if self._state is Residency.DEVICE:
            return MoveReport(0, 0.0)
        self._refuse_meta("to the device")
        return self._timed(self._restore, Residency.DEVICE)

    def to_meta(self) -> MoveReport:
        """Drop the bytes wherever they are. `allocate` and a load of weights bring the set back."""
        if self._state is Residency.META:
            return MoveReport(0, 0.0)
        return self._timed(self._drop, Residency.META)

    @contextmanager
    def readable(self) -> Iterator[None]:
        """While the block runs, the tensors may be read where they are: on the device, or as they wait in host memory.

        Nobody may write to them or move them meanwhile. Raises NotResidentError on meta.
        """
        if self._state is Residency.DEVICE:
            yield
            return
        self._refuse_meta("anywhere to be read")
        waiting = {s._cdata: copy for s, copy in zip(self._away, self._copies, strict=True) if copy is not None}
        lent: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for tensor in self._tensors():
                local = local_tensor(tensor)
                copy = waiting.get(local.untyped_storage()._cdata)
                if copy is not None:  # None: a virtual GPU's memory is host memory, or it never left
                    lent.append((local, local.data))
                    local.data = _as_stored(copy, local)
            yield
        finally:
            for local, away in reversed(lent):
                local.data = away

    def allocate(self) -> MoveReport:
        """From meta to the device with undefined contents, which the caller must fill before use."""
        if self._state is not Residency.META:
            raise NotResidentError(f"{self._owner} is on {self._state.value}; only a set on meta can be allocated")
        return self._timed(self._regrow, Residency.DEVICE)

    def _refuse_meta(self, where: str) -> None:
        if self._state is Residency.META:
            raise NotResidentError(f"{self._owner} has no bytes to move {where}: it is on meta; load weights first")

    def _timed(self, move: Callable[[], int], state: Residency) -> MoveReport:
        before, start = self._mover.fragmentation(), self._clock()
        moved = move()
        self._state = state
        return MoveReport(moved, self._clock() - start, before, self._mover.fragmentation())

    def _evict(self) -> int:
        self._away = self._storages()
        self._sizes = [s.nbytes() for s in self._away]
        self._copies = self._mover.evict(self._away)
        self._mover.trim()
        return sum(self._sizes)

    def _restore(self) -> int:
        self._mover.restore(self._away, self._copies)
        moved = sum(self._sizes)
        self._away, self._sizes, self._copies = [], [], []
        return moved

    def _drop(self) -> int:
        if self._state is Residency.DEVICE:
            self._away = self._storages()
            self._sizes = [s.nbytes() for s in self._away]
        for storage in self._away:
            storage.resize_(0)
        self._copies = []
        self._mover.trim()
        return sum(self._sizes)

    def _regrow(self) -> int:
        for storage, size in zip(self._away, self._sizes, strict=True):
            storage.resize_(size)
        moved = sum(self._sizes)
        self._away, self._sizes = [], []
        return moved

    def _storages(self) -> list[torch.UntypedStorage]:
        """The distinct storages of the set on this device, each resizable."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            local = local_tensor(tensor)
            if local.device.type != self._device.type:
                continue
            storage = local.untyped_storage()
            if storage.nbytes() and not storage.resizable():
                # Memory-mapped or borrowed bytes (safetensors, numpy) cannot be freed: take a copy that can.
                local.data = local.detach().clone()
                storage = local.untyped_storage()
            if storage.nbytes():
                found[storage._cdata] = storage
        return list(found.values())


class HostHome:
    """Tensors that live in host memory and are on a device only while they are used.

    They stay ordinary tensors, which may be saved and loaded where they are. On a virtual GPU, whose memory is host
    memory, nothing moves. Not run on a GPU yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[int, torch.Tensor] = {}  # pinned, by the identity of the tensor that comes home to it

    def visit(self, tensors: Iterable[torch.Tensor]) -> None:
        """Bring them to the device."""
        for local in map(local_tensor, tensors):
            if local.device.type != self._device.type:
                local.data = local.data.to(self._device, non_blocking=True)

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take them back to host memory."""
        away = [local for local in map(local_tensor, tensors) if local.device.type != "cpu"]
        homes: dict[int, torch.Tensor] = {}
        for local in away:
            home = self._host.get(id(local))
            if home is None or home.shape != local.shape or home.dtype != local.dtype:
                home = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            homes[id(local)] = home.copy_(local, non_blocking=True)
        if self._device.type == "cuda" and away:
            torch.cuda.current_stream(self._device).synchronize()
        for local in away:
            local.data = homes[id(local)]
        self._host |= homes


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in this process: the local shard of a DTensor, else the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def module_tensors(module: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What a training module's checkpoint holds, and its gradients: parameters, persistent buffers, optimizer state.

    Buffers that no checkpoint holds (rotary frequencies) stay where they are: they are small, and nothing could bring
    them back from meta.
    """
    tensors: list[torch.Tensor] = []
    for parameter in module.parameters():
        tensors.append(parameter)
        if parameter.grad is not None:
            tensors.append(parameter.grad)
    for owner in module.modules():
        kept = owner._non_persistent_buffers_set
        tensors.extend(b for name, b in owner._buffers.items() if b is not None and name not in kept)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors.extend(value for value in state.values() if isinstance(value, torch.Tensor))
    return tensors


def _as_stored(copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor over a copy of its storage."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(copy.untyped_storage(), *place)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
