"""How the bytes of storages leave a device and come back: in earnest, or on a virtual GPU in the books only."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import psutil
import torch

from rlix.protocol.errors import RlixError

PINNED_SHARE = 0.5
"""Of the machine's memory: most that one process pins for its moves; what does not fit waits in ordinary memory."""
_ALIGNMENT = 512  # bytes; where each storage begins in host memory, as on a device


class Mover(Protocol):
    """How the bytes of storages leave a device and come back. What raises has changed nothing."""

    def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
        """Free the storages' device memory; return for each what `restore` needs to bring it back."""
        ...

    def restore(self, storages: list[torch.UntypedStorage], copies: list[torch.Tensor | None]) -> None: ...

    def discard(self) -> None:
        """Nothing that was evicted will come back: host memory kept for it is free."""
        ...

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

    def discard(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def fragmentation(self) -> float:
        return 0.0


class HostBuffer:
    """Host memory of exactly the size that is asked for, pinned where it fits below the bound; kept for the next move.

    torch's own pinned memory comes in powers of two, which is up to twice as much.

    Args:
        pin: and undo it: make memory at an address page-locked (False: it cannot be), and let it go.
        limit_bytes: most that may be pinned.
    """

    def __init__(
        self, pin: Callable[[int, int], bool], unpin: Callable[[int], None], limit_bytes: int | None = None
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._limit = int(psutil.virtual_memory().total * PINNED_SHARE) if limit_bytes is None else limit_bytes
        self._memory = np.empty(0, dtype=np.uint8)
        self._pinned = False

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def pinned_bytes(self) -> int:
        return self._memory.nbytes if self._pinned else 0

    def lend(self, sizes: list[int]) -> list[torch.Tensor]:
        """One piece of this many bytes each. Overwrites what was lent before."""
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += size + -size % _ALIGNMENT
        if end > self._memory.nbytes:
            self.free()
            self._memory = np.empty(end, dtype=np.uint8)
            self._pinned = 0 < end <= self._limit and self._pin(self._memory.ctypes.data, end)
        # Each with a storage of its own: who stages a tensor for a checkpoint copies its whole storage.
        pieces = (self._memory[start : start + size] for start, size in zip(starts, sizes, strict=True))
        return [torch.from_numpy(piece) for piece in pieces]

    def free(self) -> None:
        if self._pinned:
            self._unpin(self._memory.ctypes.data)
        self._memory, self._pinned = np.empty(0, dtype=np.uint8), False


class SwapMover:
    """Copies storages to host memory and back; on CUDA pinned memory, kept for the next move, and a side stream."""

    def __init__(self, device: torch.device, host: HostBuffer | None = None) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        pinning = (_cuda_pin, _cuda_unpin) if self._cuda else (lambda *_: False, lambda _: None)
        self._host = host or HostBuffer(*pinning)

    def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
        copies = self._host.lend([storage.nbytes() for storage in storages])
        with self._side_stream():
            for storage, copy in zip(storages, copies, strict=True):
                copy.copy_(_as_bytes(storage), non_blocking=True)
        self._wait()
        for storage in storages:  # not before every byte has arrived
            storage.resize_(0)
        return [*copies]

    def restore(self, storages: list[torch.UntypedStorage], copies: list[torch.Tensor | None]) -> None:
        try:
            for storage, copy in zip(storages, copies, strict=True):
                assert copy is not None
                storage.resize_(copy.numel())  # on the current stream: its memory returns to the pool of that stream
            with self._side_stream():
                for storage, copy in zip(storages, copies, strict=True):
                    assert copy is not None
                    _as_bytes(storage).copy_(copy, non_blocking=True)
            self._wait()
        except BaseException:  # re-raised: the copies are whole, and the device has no room for half of them
            for storage in storages:
                storage.resize_(0)
            raise

    def discard(self) -> None:
        self._host.free()

    def trim(self) -> None:
        if self._cuda:
            torch.cuda.empty_cache()

    def fragmentation(self) -> float:
        if not self._cuda:
            return 0.0
        reserved = torch.cuda.memory_reserved(self._device)
        return 1.0 - torch.cuda.memory_allocated(self._device) / reserved if reserved else 0.0

    def _side_stream(self) -> torch.cuda.StreamContext:
        # A stream of None makes the context do nothing, which is what the CPU needs.
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _cuda_pin(address: int, size: int) -> bool:
    return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0


def _cuda_unpin(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        raise RlixError(f"host memory at {address:#x} could not be unpinned: is the device lost?")


def mover_for(device: torch.device) -> Mover:
    """The mover of a device: real copies for a GPU, accounting only for a virtual one."""
    return SwapMover(device) if device.type == "cuda" else VirtualMover()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
