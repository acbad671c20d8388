"""Tensors packed into buckets of bytes in host memory: a few large transfers instead of many small.

A bucket is a flat uint8 tensor that holds whole tensors one after the other, each at an aligned offset; the manifest
says which tensor lies where.
"""

import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from rlix.engine.weights.boxes import Box, elements, extent, slices

ALIGNMENT = 16
"""Bytes; every tensor starts at a multiple of it, which suits every dtype and leaves few gaps between tensors."""

DEFAULT_BUCKET_BYTES = 32 * 2**20
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
class Run:
    """Neighbours in a bucket that are copied at once: of one dtype, each right after the other; a large one is alone.

    `first` and `last` count the bucket's entries, `start` and `stop` its bytes.
    """

    first: int
    last: int
    start: int
    stop: int
    dtype: str

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements in a bucket's bytes."""
        return flat[self.start : self.stop].view(getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """In place of a name where a tensor is not packed whole: a box of one of this shape (None: all of it)."""

    name: str
    shape: tuple[int, ...]
    box: Box | None


Named = Iterable[tuple[str | WeightSlice, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Sent with every version, and mostly the same: what is made of one, its bytes included, is made once."""

    entries: tuple[WeightEntry, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (_as_sent(self),)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.entries)


@lru_cache(maxsize=4)
def _as_sent(manifest: Manifest) -> bytes:
    return pickle.dumps(tuple(zip(*(entry.__reduce__()[1] for entry in manifest.entries), strict=True)))


@lru_cache(maxsize=4)
def _received(columns: bytes) -> Manifest:
    return Manifest(tuple(WeightEntry(*row) for row in zip(*pickle.loads(columns), strict=True)))


@dataclass(frozen=True, slots=True)
class Bucket:
    """A full bucket and what lies in it. `data` is reused for the next bucket: copy it before asking for that one."""

    data: torch.Tensor
    entries: tuple[WeightEntry, ...]


class _Places:
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
    aliases: Aliases | None = None,
) -> Iterator[Bucket]:
    """Pack tensors, in order, into buckets of about `bucket_bytes` bytes, holding one bucket in memory at a time.

    A tensor that fills half a bucket or more travels alone, straight from its own memory when that is the host's:
    large tensors are the bulk of a large model and are not worth another copy. Names of one tensor (tied weights) are
    packed once, by their first name; `aliases` gives the further ones.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    places = _Places(bucket_bytes, aliases)
    # Pinned memory takes what a GPU sends several times as fast; torch keeps it for the next publication.
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
    entries: list[WeightEntry] = []
    tensors: list[torch.Tensor] = []

    def filled() -> Bucket:
        nonlocal buffer
        if entries[-1].nbytes > buffer.numel() and tensors[0].device != buffer.device:
            buffer = torch.empty(entries[-1].nbytes, dtype=torch.uint8, pin_memory=buffer.is_pinned())
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
    """Tensors at their places in `buffer`, or, of a single one that is where `buffer` is, its own bytes."""
    if len(tensors) == 1 and tensors[0].device == buffer.device:
        return to_bytes(tensors[0])
    target = buffer[: entries[-1].offset + entries[-1].nbytes]
    runs = runs_of(entries)
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        fill(target, runs, [tensor.to(buffer.device) for tensor in tensors])
    elif devices == {buffer.device}:
        fill(target, runs, tensors)
    elif len(tensors) == 1:
        target.copy_(to_bytes(tensors[0]))
    else:  # one transfer between devices instead of one for each tensor
        staged = torch.empty_like(target, device=tensors[0].device)
        fill(staged, runs, tensors)
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


def fill(flat: torch.Tensor, runs: Sequence[Run], tensors: Sequence[torch.Tensor]) -> None:
    """Copy these tensors to their places in a bucket's bytes: small ones that lie side by side at once."""
    for run in runs:
        some, place = tensors[run.first : run.last], run.of(flat)
        dtypes = {tensor.dtype for tensor in some}
        if len(some) == 1:
            place.view(some[0].shape).copy_(some[0])
        elif dtypes == {place.dtype}:
            torch.cat([tensor.reshape(-1) for tensor in some], out=place)
        else:
            same = some if len(dtypes) == 1 else [tensor.to(place.dtype) for tensor in some]
            place.copy_(_flatten_dense_tensors(same))


def boxed(tensor: torch.Tensor, entry: WeightEntry) -> torch.Tensor:
    """The entry's place in the whole tensor."""
    return tensor if entry.box is None else tensor[slices(entry.box)]


@dataclass(frozen=True, slots=True)
class Contents:
    """A bucket's bytes, and what lies in them."""

    flat: torch.Tensor
    entries: Sequence[WeightEntry]
    runs: Sequence[Run]

    def copy_to(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy all of it to its places in the whole tensors of these names."""
        present = [entry for run in self.runs for entry in self.entries[run.first : run.last]]
        places = [boxed(targets[entry.name], entry) for entry in present]
        left = iter(places)
        rows = [(run, list(islice(left, run.last - run.first))) for run in self.runs]
        found = [view for run, row in rows for view in _unflatten_dense_tensors(run.of(self.flat), row)]
        if places:
            torch._foreach_copy_(places, found)


def runs_of(entries: Sequence[WeightEntry]) -> tuple[Run, ...]:
    """All bytes of a bucket with these entries, in the fewest runs; what is empty is in none."""
    found: list[Run] = []
    first, start, stop, dtype, large = 0, 0, 0, "", False
    for index, entry in enumerate(entries):
        size = entry.nbytes
        if not size or large or size >= _LARGE_BYTES or (entry.offset, entry.dtype) != (stop, dtype):
            if stop > start:
                found.append(Run(first, index, start, stop, dtype))
            first, start, stop, dtype = index + (not size), entry.offset, entry.offset, entry.dtype
        stop += size
        large = size >= _LARGE_BYTES
    if stop > start:
        found.append(Run(first, len(entries), start, stop, dtype))
    return tuple(found)


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
