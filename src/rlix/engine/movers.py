"""How the bytes of storages leave a device and come back: in earnest, or on a virtual GPU in the books only."""

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch

from rlix.node.host_memory import PinnedMemory
from rlix.protocol.errors import RlixError

logger = logging.getLogger(__name__)

_ALIGNMENT = 512  # bytes; where each storage begins in host memory, as on a device
PART_BYTES = 256 * 2**20
"""About how much of a move that goes part by part travels at a time."""
ROOM_TIMEOUT_S = 30.0
"""For more room on a device: how long what comes waits while nobody leaves."""
_ROOM_POLL_S = 0.002

_Pairs = list[tuple[torch.UntypedStorage, torch.Tensor]]


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
            self._pinned = (
                self._budget is not None and self._budget.take(end) and self._pin(self._memory.ctypes.data, end)
            )
            if self._budget is not None and not self._pinned:
                self._budget.give_back()
        # Each with a storage of its own: who stages a tensor for a checkpoint copies its whole storage.
        pieces = (self._memory[start : start + size] for start, size in zip(starts, sizes, strict=True))
        return [torch.from_numpy(piece) for piece in pieces]

    def free(self) -> None:
        if self._pinned:
            self._unpin(self._memory.ctypes.data)
            if self._budget is not None:
                self._budget.give_back()
        self._memory, self._pinned = np.empty(0, dtype=np.uint8), False


class Room:
    """Of a device that others are leaving: what does not fit yet waits until it does.

    Args:
        free: bytes of the device that nobody has.
        part_bytes: about how much comes, or leaves, at a time.
    """

    def __init__(
        self,
        free: Callable[[], int],
        part_bytes: int = PART_BYTES,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.part_bytes = part_bytes
        self._free, self._clock, self._sleep = free, clock, sleep

    def take(self, grow: Callable[[], object], size: int) -> None:
        """Have so many bytes by `grow`, which says by an OutOfMemoryError that they do not fit yet.

        Raises RlixError when there is too little, and no more came for `ROOM_TIMEOUT_S`.
        """
        most, deadline = -1, 0.0
        while True:
            try:
                grow()
                return
            except torch.OutOfMemoryError as error:
                free, now = self._free(), self._clock()
                if free > most:
                    most, deadline = free, now + ROOM_TIMEOUT_S
                elif now >= deadline:
                    raise RlixError(
                        f"no room on the device for {size:,} bytes: {free:,} are free, and for {ROOM_TIMEOUT_S:g} s "
                        "nobody there made more"
                    ) from error
            self._sleep(_ROOM_POLL_S)


class SwapMover:
    """Copies storages to host memory and back; on CUDA pinned memory, kept for the next move, and a side stream.

    With `room` it does so part by part: what has left is free for others at once, and what comes waits until it fits.
    So one engine can come while another leaves, each in processes of its own. **Not run on a GPU yet.**
    """

    def __init__(self, device: torch.device, host: HostBuffer | None = None, room: Room | None = None) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._host = host or HostBuffer(_cuda_pin, _cuda_unpin, PinnedMemory() if self._cuda else None)
        self._room = room

    def evict(self, storages: list[torch.UntypedStorage]) -> list[torch.Tensor | None]:
        copies: list[torch.Tensor | None] = [*self._host.lend([storage.nbytes() for storage in storages])]
        travelling: deque[tuple[_Pairs, torch.cuda.Event | None]] = deque()
        if self._room is not None:
            self.trim()  # what the engine has freed by now is somebody else's as well
        try:
            for part in self._parts(storages, copies):
                travelling.append((part, self._start((copy, _as_bytes(storage)) for storage, copy in part)))
                if len(travelling) > 1:  # while one travels, the one before it is given back
                    self._let_go(*travelling.popleft())
            while travelling:
                self._let_go(*travelling.popleft())
        except BaseException as error:  # re-raised, unless what had left cannot come back
            self._settle()
            if self._came_back(storages, copies):
                raise
            logger.warning("bytes left a device only at the second try, as their room was taken: %s", error)
        return copies

    def restore(self, storages: list[torch.UntypedStorage], copies: list[torch.Tensor | None]) -> None:
        try:
            arrived = None
            for part in self._parts(storages, copies):
                for storage, copy in part:  # on the current stream: its memory returns to the pool of that stream
                    self._grow(storage, copy.numel())
                arrived = self._start((_as_bytes(storage), copy) for storage, copy in part)
            self._wait(arrived)
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

    def _parts(self, storages: list[torch.UntypedStorage], copies: list[torch.Tensor | None]) -> Iterator[_Pairs]:
        part: _Pairs = []
        size = 0
        for storage, copy in zip(storages, copies, strict=True):
            assert copy is not None
            if part and self._room is not None and size + copy.numel() > self._room.part_bytes:
                yield part
                part, size = [], 0
            part.append((storage, copy))
            size += copy.numel()
        if part:
            yield part

    def _grow(self, storage: torch.UntypedStorage, size: int) -> None:
        if self._room is None:
            self._resize(storage, size)
        else:
            self._room.take(lambda: self._resize(storage, size), size)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        storage.resize_(size)

    def _start(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event | None:
        """Begin to copy, each second to the first; what `_wait` is given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # a stream of None makes the context do nothing, as the CPU needs
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, arrived: torch.cuda.Event | None) -> None:
        if arrived is not None:
            arrived.synchronize()

    def _let_go(self, part: _Pairs, arrived: torch.cuda.Event | None) -> None:
        self._wait(arrived)
        for storage, _ in part:  # not before every byte has arrived
            self._resize(storage, 0)
        self.trim()

    def _came_back(self, storages: list[torch.UntypedStorage], copies: list[torch.Tensor | None]) -> bool:
        """After a move away that broke off: back to the device; or, where others have taken its room, all away."""
        pairs = [pair for part in self._parts(storages, copies) for pair in part]
        gone = [(storage, copy) for storage, copy in pairs if not storage.nbytes()]
        try:
            self.restore([storage for storage, _ in gone], [copy for _, copy in gone])
            return True
        except (RlixError, torch.OutOfMemoryError):
            rest = [(storage, copy) for storage, copy in pairs if storage.nbytes()]
            self._let_go(rest, self._start((copy, _as_bytes(storage)) for storage, copy in rest))
            return False

    def _settle(self) -> None:
        """Until nothing travels any more: what is freed then is nobody's target."""
        if self._stream is not None:
            self._stream.synchronize()


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


def mover_for(device: torch.device, *, gradual: bool = False) -> Mover:
    """The mover of a device: real copies for a GPU, part by part if wanted; accounting only for a virtual one."""
    if device.type != "cuda":
        return VirtualMover()
    return SwapMover(device, room=Room(lambda: int(torch.cuda.mem_get_info(device)[0])) if gradual else None)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
