"""Where an engine's bytes are: on its device, in host memory, or nowhere. The only code that moves them.

A `ResidentSet` moves whole *storages*, not tensors: a storage that leaves the device shrinks to zero bytes and grows
back when it returns, so every view of it (a parameter, the flat shard FSDP keeps of it, an optimizer's moments, tied
weights) keeps its identity and needs no patching. FSDP frees its all-gathered parameters the same way.

Two movers have the same life cycle, accounting and errors. `SwapMover` (CUDA) copies through pinned host memory on a
side stream, at once or part by part. `VirtualMover` (a virtual GPU) counts the bytes and leaves them: its device memory
*is* host memory.
"""

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from rlix.engine.life_cycle import SOURCE, Part, Residency, training
from rlix.engine.movers import Mover, mover_for, trim_heap
from rlix.protocol.errors import NotResidentError


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
        self.life = training(resident=True)
        self._away: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._copies: list[torch.Tensor | None] = []

    @property
    def state(self) -> Residency:
        return self.life.residency

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device now; 0 when away."""
        return sum(s.nbytes() for s in self._storages()) if self.state is Residency.DEVICE else 0

    @property
    def host_bytes(self) -> int:
        """Bytes held in host memory to come back from; 0 on the device and on meta."""
        return sum(self._sizes) if self.state is Residency.HOST else 0

    def check(self) -> None:
        """Raise `NotResidentError` unless the bytes are on the device."""
        if self.state is not Residency.DEVICE:
            raise NotResidentError(
                f"{self._owner} was used while its bytes are on {self.state.value}, not on {self._device}; "
                "bring them back first with .cuda() (or load weights after .meta())"
            )

    def to_host(self) -> MoveReport:
        """Free the device memory and keep the bytes in host memory. Nothing happens when already there.

        When this or `to_device` raises, the bytes are where they were; or else they are lost, which `life` says then.
        """
        if self.state is Residency.HOST:
            return MoveReport(0, 0.0)
        self._refuse_meta("to host")
        return self._timed(self._evict)

    def to_device(self) -> MoveReport:
        """Bring the bytes back, equal to the bit. Nothing happens when already there."""
        if self.state is Residency.DEVICE:
            return MoveReport(0, 0.0)
        self._refuse_meta("to the device")
        return self._timed(self._restore)

    def to_meta(self) -> MoveReport:
        """Drop the bytes wherever they are. `filling` brings the set back."""
        if self.state is Residency.META:
            return MoveReport(0, 0.0)
        return self._timed(self._drop)

    @contextmanager
    def filling(self) -> Iterator[MoveReport]:
        """From meta to the device: the block fills the tensors, whose contents are undefined. If it raises, they go."""
        if self.state is not Residency.META:
            raise NotResidentError(f"{self._owner} is on {self.state.value}; only a set on meta can be filled")
        try:
            yield self._timed(self._regrow)
        except BaseException:  # re-raised: half of it is worth nothing
            self.to_meta()
            raise
        self.life = self.life.filled(SOURCE)

    @contextmanager
    def readable(self) -> Iterator[None]:
        """While the block runs, the tensors may be read where they are: on the device, or as they wait in host memory.

        Nobody may write to them or move them meanwhile. Raises NotResidentError on meta.
        """
        if self.state is Residency.DEVICE:
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

    def _refuse_meta(self, where: str) -> None:
        if self.state is Residency.META:
            raise NotResidentError(f"{self._owner} has no bytes to move {where}: it is on meta; load weights first")

    def _timed(self, move: Callable[[], int]) -> MoveReport:
        before, start = self._mover.fragmentation(), self._clock()
        moved = move()
        return MoveReport(moved, self._clock() - start, before, self._mover.fragmentation())

    def _evict(self) -> int:
        leaving = self._storages()
        sizes = [s.nbytes() for s in leaving]
        try:
            self._copies = self._mover.evict(leaving)
        except BaseException as error:  # re-raised
            if not all(s.nbytes() for s in leaving):
                self._lose(leaving, sizes, f"its bytes were lost on the way to host memory: {error}")
            raise
        self._away, self._sizes = leaving, sizes
        self.life = self.life.released(keep_host=True)
        self._mover.trim()
        return sum(sizes)

    def _lose(self, storages: list[torch.UntypedStorage], sizes: list[int], reason: str) -> None:
        """Some of the bytes are gone for good, and the others worth nothing: `filling` brings the set back."""
        self._away, self._sizes = storages, sizes
        self.life = self.life.failed(reason, Part.WEIGHTS)
        for storage in storages:
            storage.resize_(0)
        self._mover.discard()

    def _restore(self) -> int:
        self._mover.restore(self._away, self._copies)
        moved = sum(self._sizes)
        self._away, self._sizes, self._copies = [], [], []
        self.life = self.life.brought(Part.WEIGHTS)
        return moved

    def _drop(self) -> int:
        if self.state is Residency.DEVICE:
            self._away = self._storages()
            self._sizes = [s.nbytes() for s in self._away]
        for storage in self._away:
            storage.resize_(0)
        self._copies = []
        self.life = self.life.released(keep_host=False)
        self._mover.discard()
        self._mover.trim()
        trim_heap()
        return sum(self._sizes)

    def _regrow(self) -> int:
        try:
            for storage, size in zip(self._away, self._sizes, strict=True):
                storage.resize_(size)
        except BaseException:  # re-raised: there is no room
            for storage in self._away:
                storage.resize_(0)
            raise
        moved = sum(self._sizes)
        self._away, self._sizes = [], []
        self.life = self.life.brought(Part.WEIGHTS)
        return moved

    def _storages(self) -> list[torch.UntypedStorage]:
        """The distinct storages of the set on this device, each resizable."""
        here = [each for each in map(local_tensor, self._tensors()) if each.device.type == self._device.type]
        _make_resizable(here)
        storages = (each.untyped_storage() for each in here)
        return list({storage._cdata: storage for storage in storages if storage.nbytes()}.values())


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


def tensors_over(storages: Collection[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """All tensors of this process that see bytes of these storages (by `_cdata`), which are named with each."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            try:
                storage = each.untyped_storage()._cdata
            except (NotImplementedError, RuntimeError):  # sparse and functional ones have none
                continue
            if storage in storages:
                yield storage, each


def _make_resizable(tensors: Iterable[torch.Tensor]) -> None:
    """Memory-mapped or borrowed bytes (safetensors, numpy) cannot be freed: they get copies that can.

    Whoever sees the same bytes, as a tied weight or a `state_dict` does, sees them still.
    """
    fixed: dict[int, list[torch.Tensor]] = {}
    for each in tensors:
        storage = each.untyped_storage()
        if storage.nbytes() and not storage.resizable():
            fixed.setdefault(storage._cdata, []).append(each)
    if not fixed:
        return
    views: dict[int, list[torch.Tensor]] = {}
    for storage_id, view in tensors_over(fixed):
        views.setdefault(storage_id, []).append(view)
    for storage_id, mine in fixed.items():
        whole = mine[0].untyped_storage()
        for start, end in sorted(map(_extent, mine), key=lambda extent: extent[0] - extent[1]):  # the longest first
            copy = whole[start:end].clone()
            for view in views[storage_id]:
                first, last = _extent(view)
                if view.untyped_storage()._cdata == storage_id and start <= first and last <= end:
                    place = (first - start) // view.element_size(), view.size(), view.stride()
                    view.data = torch.empty(0, dtype=view.dtype, device=view.device).set_(copy, *place)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first to behind the last that the tensor sees."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + int(count) * tensor.element_size()


def _as_stored(copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor over a copy of its storage."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(copy.untyped_storage(), *place)
