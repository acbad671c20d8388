"""Tensors packed into buckets of bytes, in host memory or on a device: a few large transfers instead of many small.

A bucket is a flat uint8 tensor that holds whole tensors one after the other, each at an aligned offset; the manifest
says which tensor lies where.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from rlix.engine.weights.layout import Box, elements, extent

ALIGNMENT = 16
"""Bytes; every tensor starts at a multiple of it, which suits every dtype and leaves few gaps between tensors."""

DEFAULT_BUCKET_BYTES = 32 * 2**20
HOST = torch.device("cpu")
_LARGE_BYTES = 2**16  # from where on a tensor's own copy costs less than one more on its way

Bytes = npt.NDArray[np.uint8]
Aliases = Mapping[str, tuple[str, ...]]
"""First name of a tied tensor -> its further names."""


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """Where one tensor, or a box of it, lies.

    `dtype` is torch's name ("bfloat16"), `shape` the whole tensor's; `aliases` are further names of a tied tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    aliases: tuple[str, ...] = ()
    box: Box | None = None

    def __reduce__(self) -> tuple[type["WeightEntry"], tuple[Any, ...]]:
        """Thousands are sent with every version, and what dataclasses do by themselves takes three times as long."""
        return WeightEntry, (self.name, self.dtype, self.shape, self.bucket, self.offset, self.aliases, self.box)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of what lies here."""
        return self.shape if self.box is None else extent(self.box)

    @property
    def nbytes(self) -> int:
        return itemsize(self.dtype) * (math.prod(self.shape) if self.box is None else elements(self.box))


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """In place of a name where a tensor is not packed whole: a box of one of this shape (None: all of it)."""

    name: str
    shape: tuple[int, ...]
    box: Box | None


Named = Iterable[tuple[str | WeightSlice, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Manifest:
    entries: tuple[WeightEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A full bucket and what lies in it. `data` is reused for the next bucket: copy it before asking for that one."""

    data: torch.Tensor
    entries: tuple[WeightEntry, ...]


class _Layout:
    """Gives each tensor its place: packed tightly, or alone when it fills half a bucket or more."""

    def __init__(self, bucket_bytes: int, aliases: Aliases | None) -> None:
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        self._bucket_bytes, self._aliases = bucket_bytes, aliases or {}
        self._bucket, self._end = 0, -1  # the bucket being filled, and where its last tensor ends; -1: it is empty
        self.full = False  # whether the last tensor placed ends its bucket

    def place(self, key: "str | WeightSlice", tensor: torch.Tensor) -> WeightEntry:
        size = tensor.nbytes
        alone = size * 2 >= self._bucket_bytes
        offset = max(self._end, 0) + -max(self._end, 0) % ALIGNMENT
        if self.full or (self._end >= 0 and (alone or offset + size > self._bucket_bytes)):
            self._bucket, offset = self._bucket + 1, 0
        self.full, self._end = alone, offset + size
        piece = key if isinstance(key, WeightSlice) else WeightSlice(key, tuple(tensor.shape), None)
        dtype, more = dtype_name(tensor.dtype), self._aliases.get(piece.name, ())
        return WeightEntry(piece.name, dtype, piece.shape, self._bucket, offset, more, piece.box)


def pack_stream(
    named: Named,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    device: torch.device = HOST,
    aliases: Aliases | None = None,
) -> Iterator[Bucket]:
    """Pack tensors, in order, into buckets of about `bucket_bytes` bytes, holding one bucket in memory at a time.

    A tensor that fills half a bucket or more travels alone, straight from its own memory when that is on `device`:
    large tensors are the bulk of a large model and are not worth another copy. Names of one tensor (tied weights) are
    packed once, by their first name; `aliases` gives the further ones.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    places = _Layout(bucket_bytes, aliases)
    # Pinned memory takes what a GPU sends several times as fast; torch keeps it for the next publication.
    pinned = device.type == "cpu" and torch.cuda.is_initialized()
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    entries: list[WeightEntry] = []
    tensors: list[torch.Tensor] = []

    def filled() -> Bucket:
        bucket = Bucket(_packed(entries, tensors, buffer), tuple(entries))
        entries.clear()
        tensors.clear()
        return bucket

    for name, tensor in named:
        entry = places.place(name, tensor)
        if entries and entry.bucket != entries[0].bucket:
            yield filled()
        entries.append(entry)
        tensors.append(tensor)
        if places.full:
            yield filled()
    if entries:
        yield filled()


@torch.no_grad()
def _packed(entries: Sequence[WeightEntry], tensors: list[torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
    """Tensors at their places in `buffer`, or, of a single one, its own bytes where `buffer` is."""
    if len(tensors) == 1:
        return to_bytes(tensors[0]).to(buffer.device)
    target = buffer[: entries[-1].offset + entries[-1].nbytes]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        fill(target, entries, [tensor.to(buffer.device) for tensor in tensors])
    elif devices == {buffer.device}:
        fill(target, entries, tensors)
    else:  # one transfer between devices instead of one for each tensor
        staged = torch.empty_like(target, device=tensors[0].device)
        fill(staged, entries, tensors)
        target.copy_(staged)
    return target


def as_array(data: torch.Tensor) -> Bytes:
    """The bytes themselves, as numpy sees them.

    `Tensor.numpy` would do the same and forbid torch for good to free the memory, which an engine that leaves its
    device has to.
    """
    return np.from_dlpack(data).view(np.uint8)


def pack(named: Named, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[list[Bytes], Manifest]:
    """All buckets at once, each in memory of its own, and their manifest."""
    buckets: list[Bytes] = []
    entries: list[WeightEntry] = []
    for bucket in pack_stream(named, bucket_bytes):
        buckets.append(as_array(bucket.data).copy())
        entries.extend(bucket.entries)
    return buckets, Manifest(tuple(entries))


def views(flat: torch.Tensor, entries: Sequence[WeightEntry]) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
    """What lies in a bucket's bytes, as views of them (no copy)."""
    typed: dict[str, tuple[torch.Tensor, int]] = {}
    for entry in entries:
        if entry.dtype not in typed:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            whole_elements = flat.numel() // dtype.itemsize * dtype.itemsize  # the last tensor's may be smaller
            typed[entry.dtype] = (flat[:whole_elements].view(dtype), dtype.itemsize)
        all_of_it, itemsize = typed[entry.dtype]
        extent = entry.extent
        yield entry, all_of_it.narrow(0, entry.offset // itemsize, math.prod(extent)).view(extent)


def fill(flat: torch.Tensor, entries: Sequence[WeightEntry], tensors: Sequence[torch.Tensor]) -> None:
    """Copy these tensors to their places in a bucket's bytes: small ones that lie side by side at once."""
    for first, last in _runs(entries):
        run, place = tensors[first:last], _stretch(flat, entries[first:last])
        if len(run) == 1:
            place.view(run[0].shape).copy_(run[0])
            continue
        if len({tensor.dtype for tensor in run}) > 1:
            run = [tensor.to(place.dtype) for tensor in run]
        place.copy_(_flatten_dense_tensors(run))


def spread(flat: torch.Tensor, entries: Sequence[WeightEntry], places: Sequence[torch.Tensor]) -> None:
    """Copy what lies in a bucket's bytes to places of the same shapes."""
    into = [place for place in places if place.numel()]
    present = [entry for entry, place in zip(entries, places, strict=True) if place.numel()]
    found: list[torch.Tensor] = []
    for first, last in _runs(present):
        found.extend(_unflatten_dense_tensors(_stretch(flat, present[first:last]), into[first:last]))
    if into:
        torch._foreach_copy_(into, found)


def _runs(entries: Sequence[WeightEntry]) -> Iterator[tuple[int, int]]:
    """First and last of those that have one dtype and lie one right after the other; a large tensor is alone."""
    first, end, dtype = 0, -1, ""
    for index, entry in enumerate(entries):
        size = entry.nbytes
        if index and (entry.offset != end or entry.dtype != dtype or size >= _LARGE_BYTES):
            yield first, index
            first = index
        end = -1 if size >= _LARGE_BYTES else entry.offset + size
        dtype = entry.dtype
    if entries:
        yield first, len(entries)


def _stretch(flat: torch.Tensor, run: Sequence[WeightEntry]) -> torch.Tensor:
    """A run's elements."""
    return flat[run[0].offset : run[-1].offset + run[-1].nbytes].view(getattr(torch, run[0].dtype))


def part_of(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The view of this shape that begins there."""
    if tensor.shape == tuple(shape):
        return tensor
    return tensor[tuple([slice(at, at + size) for at, size in zip(start, shape, strict=True)])]


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, flat and where they are: a view when it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element, by torch's name of the dtype."""
    size: int = getattr(torch, dtype).itemsize
    return size


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As torch spells it, without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
