"""How the bytes of storages leave a device and come back: in earnest, or on a virtual GPU in the books only."""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from rlix.node.pinned_memory import PinnedMemory
from rlix.protocol.errors import RlixError

_ALIGNMENT = 512  # bytes; where each storage begins in host memory, as on a device


class Mover(Protocol):
    """How the bytes of storages leave a device and come back. What raises has changed nothing."""

    def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
        """Free the storages' device memory; return for each what `restore` needs to bring it back.

        What raises and leaves a storage without bytes has lost what they all held.
        """
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
    """Host memory of exactly the size that is asked for, pinned where the node has room for it; kept for the next move.

    torch's own pinned memory comes in powers of two, which is up to twice as much.

    Args:
        pin: and undo it: make memory at an address page-locked (False: it cannot be), and let it go.
        budget: of what may be pinned on this node.
    """

    def __init__(
        self, pin: Callable[[int, int], bool], unpin: Callable[[int], None], budget: PinnedMemory | None = None
    ) -> None:
        self._pin, self._unpin, self._budget = pin, unpin, budget
        self._memory = np.empty(0, dtype=np.uint8)
        self._pinned: weakref.finalize[..., HostBuffer] | None = None  # lets it go

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def pinned_bytes(self) -> int:
        return self._memory.nbytes if self._pinned is not None else 0

    def lend(self, sizes: list[int]) -> list[torch.Tensor]:
        """One piece of this many bytes each. Overwrites what was lent before."""
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += size + -size % _ALIGNMENT
        if end > self._memory.nbytes:
            self.free()
            self._memory = np.empty(end, dtype=np.uint8)
            if self._budget is not None:
                self._pin_within(self._budget)
        # Each with a storage of its own: who stages a tensor for a checkpoint copies its whole storage.
        pieces = (self._memory[start : start + size] for start, size in zip(starts, sizes, strict=True))
        return [torch.from_numpy(piece) for piece in pieces]

    def free(self) -> None:
        if self._pinned is not None:
            self._pinned()
        self._memory, self._pinned = np.empty(0, dtype=np.uint8), None

    def _pin_within(self, budget: PinnedMemory) -> None:
        if not budget.take(self._memory.nbytes):
            return
        # Its pages come from many threads at once, not from one while it is pinned.
        torch.from_numpy(self._memory).zero_()
        if not self._pin(self._memory.ctypes.data, self._memory.nbytes):
            budget.give_back()
            return
        # Memory that goes back to the system while CUDA has it page-locked makes whatever has its addresses next fail.
        self._pinned = weakref.finalize(self, _let_go, self._memory, self._unpin, budget)
        self._pinned.atexit = False  # the process takes all with it


class SwapMover:
    """Copies storages to host memory and back; on CUDA pinned memory, kept for the next move, and a side stream."""

    def __init__(self, device: torch.device, host: HostBuffer | None = None) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._host = host or HostBuffer(_cuda_pin, _cuda_unpin, PinnedMemory() if self._cuda else None)

    def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
        copies = self._host.lend([storage.nbytes() for storage in storages])
        try:
            self._copy((copy, _as_bytes(storage)) for storage, copy in zip(storages, copies, strict=True))
            for storage in storages:  # not before every byte has arrived
                self._resize(storage, 0)
            self.trim()
        except BaseException:  # re-raised
            self._settle()
            gone = [pair for pair in zip(storages, copies, strict=True) if pair[1].numel() and not pair[0].nbytes()]
            self.restore([storage for storage, _ in gone], [copy for _, copy in gone])
            raise
        return [*copies]

    def restore(self, storages: list[torch.UntypedStorage], copies: Sequence[torch.Tensor | None]) -> None:
        pairs = [(storage, copy) for storage, copy in zip(storages, copies, strict=True) if copy is not None]
        try:
            for storage, copy in pairs:  # on the current stream: its memory returns to the pool of that stream
                self._resize(storage, copy.numel())
            self._copy((_as_bytes(storage), copy) for storage, copy in pairs)
        except BaseException:  # re-raised: the copies are whole, and the device has no room for half of them
            self._settle()
            for storage in storages:
                self._resize(storage, 0)
            self.trim()
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

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        storage.resize_(size)

    def _copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Each second to the first; returns when all have arrived."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # a stream of None makes the context do nothing, as the CPU needs
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        """Until nothing travels any more: what is freed then is nobody's target."""
        if self._stream is not None:
            self._stream.synchronize()


def _let_go(memory: npt.NDArray[np.uint8], unpin: Callable[[int], None], budget: PinnedMemory) -> None:
    unpin(memory.ctypes.data)
    budget.give_back()


def _cuda_pin(address: int, size: int) -> bool:
    pinned = int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0
    if not pinned:
        # CUDA keeps the error, and torch would blame it on the next kernel that is started: let that be this one.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return pinned


def _cuda_unpin(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        raise RlixError(f"host memory at {address:#x} could not be unpinned: is the device lost?")


def trim_heap() -> None:
    """Give freed host memory back to the system. The C library (glibc; others have no such call) keeps what lies below
    something that is still used, and a state that is dropped and loaded again leaves more of that each time."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def mover_for(device: torch.device) -> Mover:
    """The mover of a device: real copies for a GPU, accounting only for a virtual one."""
    return SwapMover(device) if device.type == "cuda" else VirtualMover()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
