"""Versioned weights as host buckets: packed once by the trainer, pulled by whoever needs them.

A bucket is a flat uint8 array that holds whole tensors one after the other, each at an aligned offset; the manifest
says which tensor lies where. Buckets live in Ray's object store: shared memory on a node (readers map it, nothing is
copied), transferred between nodes. Few large transfers instead of one per parameter is what makes a model of many
small tensors cheap to sync.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlix.engine.residency import local_tensor
from rlix.protocol.errors import WaitTimeoutError, WeightSyncError

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple of it, which suits every dtype and a CPU cache line."""

DEFAULT_BUCKET_BYTES = 32 * 2**20

Bytes = npt.NDArray[np.uint8]
Fetch = Callable[[Any, float], Bytes]


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """Where one tensor lies. `dtype` is torch's name ("bfloat16"); `aliases` are further names of a tied tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def nbytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize * math.prod(self.shape)
        return size


@dataclass(frozen=True, slots=True)
class Manifest:
    entries: tuple[WeightEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """One version of a model's weights. Cheap to send: `buckets` are references, not bytes."""

    version: int
    manifest: Manifest
    buckets: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ApplyReport:
    version: int
    tensors: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """A full bucket and what lies in it. `data` is reused for the next bucket: copy it before asking for that one."""

    data: Bytes
    entries: tuple[WeightEntry, ...]


def pack_stream(
    named: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[Bucket]:
    """Pack tensors, in order, into buckets of about `bucket_bytes` bytes, holding one bucket in memory at a time.

    A tensor that fills half a bucket or more travels alone, straight from its own memory when that is host memory:
    large tensors are the bulk of a large model and are not worth another copy. Names of one tensor (tied weights) are
    packed once, by their first name; see `tied_names` for the rest.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    # Pinned memory takes what a GPU sends several times as fast; torch keeps it for the next publication.
    buffer = torch.empty(bucket_bytes + ALIGNMENT, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
    entries: list[WeightEntry] = []
    pieces: list[torch.Tensor] = []
    index, used = 0, 0

    def full() -> Bucket:
        target = buffer[:used]
        if len({piece.device for piece in pieces}) > 1:
            torch.cat([piece.cpu() for piece in pieces], out=target)
        elif pieces[0].is_cpu:
            torch.cat(pieces, out=target)
        else:
            target.copy_(torch.cat(pieces))  # one transfer from the device instead of one for each tensor
        return Bucket(target.numpy(), tuple(entries))

    for name, tensor in named:
        data = to_bytes(tensor)
        size = data.numel()
        alone = size * 2 >= bucket_bytes
        if entries and (alone or used + size > bucket_bytes):
            yield full()
            entries, pieces, index, used = [], [], index + 1, 0
        entry = WeightEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), index, used)
        if alone:
            yield Bucket(data.cpu().numpy(), (entry,))
            index += 1
            continue
        entries.append(entry)
        pieces.append(data)
        used += size
        if padding := -used % ALIGNMENT:
            pieces.append(_padding(data.device)[:padding])
            used += padding
    if entries:
        yield full()


def pack(
    named: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> tuple[list[Bytes], Manifest]:
    """All buckets at once, each in memory of its own, and their manifest."""
    buckets: list[Bytes] = []
    entries: list[WeightEntry] = []
    for bucket in pack_stream(named, bucket_bytes):
        buckets.append(bucket.data.copy())
        entries.extend(bucket.entries)
    return buckets, Manifest(tuple(entries))


def publish(
    named: Iterable[tuple[str, torch.Tensor]],
    version: int,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    aliases: dict[str, tuple[str, ...]] | None = None,
    put: Callable[[Bytes], Any] | None = None,
) -> PublishedWeights:
    """Stream tensors into stored buckets; host memory in use never exceeds one bucket or the largest tensor.

    `aliases` gives a tied tensor's further names by its first. `put` stores one bucket and returns its reference
    (default: Ray's object store, where the buckets live as long as somebody holds the result).
    """
    if put is None:
        import ray

        put = ray.put
    aliases = aliases or {}
    references: list[Any] = []
    entries: list[WeightEntry] = []
    for bucket in pack_stream(named, bucket_bytes):
        references.append(put(bucket.data))
        entries.extend(
            replace(entry, aliases=aliases[entry.name]) if aliases.get(entry.name) else entry
            for entry in bucket.entries
        )
    return PublishedWeights(version, Manifest(tuple(entries)), tuple(references))


def unpack(buckets: Sequence[Bytes], manifest: Manifest) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
    """The tensors, as views of the buckets (no copy). They may lie in read-only shared memory: never write to them."""
    for index, entries in _by_bucket(manifest):
        yield from _views(_as_tensor(buckets[index]), entries)


def stream(
    published: PublishedWeights, *, timeout_s: float = 60.0, fetch: Fetch | None = None
) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
    """Pull bucket by bucket and yield each tensor as a read-only view; for executors with a loader of their own."""
    for index, entries in _by_bucket(published.manifest):
        yield from _views(_as_tensor(_fetch(published, index, timeout_s, fetch)), entries)


def apply(
    model: torch.nn.Module, published: PublishedWeights, *, timeout_s: float = 60.0, fetch: Fetch | None = None
) -> ApplyReport:
    """Copy published weights into a model in place, after every name, shape and dtype was found to agree.

    Each name of the model's state dict must be published, and each published tensor must have a place in the model.
    A model that ties weights takes a tied tensor once. dtypes must agree, unless both are floating point: then the
    copy converts, which is how a trainer in float32 feeds a bfloat16 replica.

    Raises:
        WeightSyncError: lists every missing, unknown, mis-shaped and conflicting name; the model is unchanged.
        WaitTimeoutError: a bucket did not arrive within `timeout_s`; the model may be partly updated.
    """
    start = time.perf_counter()
    targets = _targets(model, published)
    moved = 0
    with torch.no_grad():
        for index, entries in _by_bucket(published.manifest):
            places = [targets[entry.name] for entry in entries]
            flat = _as_tensor(_fetch(published, index, timeout_s, fetch))
            devices = {place.device for place in places}
            if len(places) > 1 and len(devices) == 1:
                flat = flat.to(devices.pop())  # to a GPU in one transfer instead of one for each tensor
            torch._foreach_copy_(places, [view for _, view in _views(flat, entries)])
            moved += sum(entry.nbytes for entry in entries)
    return ApplyReport(published.version, len(published.manifest.entries), moved, time.perf_counter() - start)


def check(model: torch.nn.Module, published: PublishedWeights) -> None:
    """Raise the `WeightSyncError` that `apply` would raise; the model may be on meta."""
    _targets(model, published)


def pulled(published: PublishedWeights, *, timeout_s: float = 60.0, fetch: Fetch | None = None) -> PublishedWeights:
    """The same weights with the buckets' bytes in place of references, for processes that Ray does not know."""
    buckets = tuple(_fetch(published, index, timeout_s, fetch) for index in range(len(published.buckets)))
    return replace(published, buckets=buckets)


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by state-dict name, tied names included; not detached, not gathered."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def tied_names(named: dict[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """First name -> the further names of the same tensor; every tensor has an entry, in order."""
    first: dict[int, str] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, tensor in named.items():
        owner = first.setdefault(id(tensor), name)
        names[owner] = () if owner == name else (*names[owner], name)
    return names


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, flat and where they are: a view when it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@cache
def _padding(device: torch.device) -> torch.Tensor:
    return torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As torch spells it, without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class _Writable:
    """Lends a read-only array's memory as writable, because torch warns of any other; keeps the array alive."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _as_tensor(data: Bytes) -> torch.Tensor:
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Writable(data)))


def _views(flat: torch.Tensor, entries: Sequence[WeightEntry]) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
    typed: dict[str, tuple[torch.Tensor, int]] = {}
    for entry in entries:
        if entry.dtype not in typed:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            typed[entry.dtype] = (flat.view(dtype), dtype.itemsize)
        whole, itemsize = typed[entry.dtype]
        yield entry, whole.narrow(0, entry.offset // itemsize, math.prod(entry.shape)).view(entry.shape)


def _by_bucket(manifest: Manifest) -> list[tuple[int, list[WeightEntry]]]:
    groups: dict[int, list[WeightEntry]] = {}
    for entry in manifest.entries:
        groups.setdefault(entry.bucket, []).append(entry)
    return list(groups.items())


def _fetch(published: PublishedWeights, index: int, timeout_s: float, fetch: Fetch | None) -> Bytes:
    reference = published.buckets[index]
    if fetch is not None:
        return fetch(reference, timeout_s)
    if isinstance(reference, np.ndarray):
        return reference
    try:
        # Unlike `ray.get`, this may be called in a thread of an async actor, which replicas are.
        data: Bytes = reference.future().result(timeout=timeout_s)
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"bucket {index} of {len(published.buckets)} of weight version {published.version} did not arrive within "
            f"{timeout_s:g} s from Ray's object store (owner: the trainer that published it)"
        ) from error
    return data


def _targets(model: torch.nn.Module, published: PublishedWeights) -> dict[str, torch.Tensor]:
    """Where each published tensor goes in the model, by its first name; every disagreement in one error."""
    named = named_weights(model)
    known: set[str] = set()
    problems: list[str] = []
    taken: dict[int, str] = {}
    targets: dict[str, torch.Tensor] = {}
    for entry in published.manifest.entries:
        known.update(entry.names)
        places = [named[name] for name in entry.names if name in named]
        if not places:
            problems.append(f"unknown here: {entry.name}")
            continue
        distinct = list({id(place): place for place in places}.values())
        if len(distinct) > 1:
            problems.append(f"tied by the trainer, separate here: {', '.join(entry.names)}")
        target = local_tensor(distinct[0])
        other = taken.setdefault(id(distinct[0]), entry.name)
        if other != entry.name:
            problems.append(f"tied here, separate in the trainer: {other}, {entry.name}")
        problems.extend(_mismatch(entry, target))
        targets[entry.name] = target
    problems.extend(f"not published: {name}" for name in named if name not in known)
    if problems:
        raise WeightSyncError(
            f"weight version {published.version} does not fit {type(model).__name__}; nothing was changed: "
            + "; ".join(problems)
        )
    return targets


def _mismatch(entry: WeightEntry, target: torch.Tensor) -> list[str]:
    if tuple(target.shape) != entry.shape:
        return [f"shape of {entry.name}: published {list(entry.shape)}, here {list(target.shape)}"]
    published = getattr(torch, entry.dtype)
    if target.dtype != published and not (target.dtype.is_floating_point and published.is_floating_point):
        return [f"dtype of {entry.name}: published {entry.dtype}, here {dtype_name(target.dtype)}"]
    return []
