"""Versioned weights: packed once by the trainer, pulled by whoever needs them.

Published buckets live in Ray's object store: shared memory on a node (readers map it, nothing is copied), transferred
between nodes. Each rank of a trainer publishes what it holds, so a bucket may hold boxes of tensors.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.exceptions import RayError

from rlix.engine.life_cycle import WeightsId
from rlix.engine.lora import AdapterConfig, without_adapters
from rlix.engine.residency import local_tensor
from rlix.engine.time_limits import loading_s
from rlix.engine.weights.boxes import Box, common, elements, extent, slices, whole
from rlix.engine.weights.buckets import (
    DEFAULT_BUCKET_BYTES,
    Aliases,
    Bytes,
    Contents,
    Manifest,
    Named,
    Run,
    WeightEntry,
    as_array,
    dtype_name,
    itemsize,
    pack_stream,
    part_of,
    runs_of,
    views,
)
from rlix.engine.weights.known_answer import KnownAnswer
from rlix.engine.weights.memory import HostMemory, opened_host
from rlix.protocol.errors import RlixError, WaitTimeoutError, WeightSyncError

Fetch = Callable[[Any, float], Bytes]
Wanted = Mapping[str, Sequence[Box]]
"""What a receiver reads: boxes of the tensors of these names, which do not overlap."""


class TransferError(RlixError):
    """Weights broke off in the middle: some tensors of a receiver may be new and some old."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """One version of a model's weights. Cheap to send: `buckets` are references, not bytes.

    `known` is what they answer, where the trainer was asked.

    `adapters` come on top of them. Weights that differ from those that are there in `version` and adapters alone, not
    in `publication`, move only the adapters that are new.
    """

    version: int
    manifest: Manifest
    buckets: tuple[Any, ...]
    publication: str = field(default_factory=lambda: uuid.uuid4().hex)
    adapters: tuple["PublishedAdapter", ...] = ()
    known: KnownAnswer | None = None

    @property
    def id(self) -> WeightsId:
        """Which weights these are, also among those of other trainers, whose numbers begin at 1 as well."""
        return WeightsId(self.version, self.publication)


def check_published(weights: object) -> None:
    """Raises TypeError: this is something else, such as a folder."""
    if not isinstance(weights, PublishedWeights):
        given = repr(weights) if isinstance(weights, str | Path) else type(weights).__name__
        raise TypeError(
            f"weights are what `TrainEngine.publish()` returns, not {given}: for those of a folder, "
            "build an engine of it"
        )


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """One version of a LoRA adapter: what it is, and its tensors by the names that PEFT's folders have."""

    name: str
    config: AdapterConfig
    weights: PublishedWeights

    def tensors(self) -> dict[str, torch.Tensor]:
        """Pulled from where they are stored; never to be written to."""
        return {entry.name: tensor for entry, tensor in stream(self.weights)}

    def stored(self) -> "PublishedAdapter":
        """With references in place of bytes, stored by this process: they live as long as it does."""
        import ray

        buckets = tuple(ray.put(bucket) for bucket in self.weights.buckets)
        return replace(self, weights=replace(self.weights, buckets=buckets))


Published = PublishedWeights | PublishedAdapter


def publish(
    named: Named,
    version: int,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    aliases: Aliases | None = None,
    put: Callable[[Bytes], Any] | None = None,
) -> PublishedWeights:
    """Stream tensors into stored buckets; host memory in use never exceeds one bucket or the largest tensor.

    `aliases` gives a tied tensor's further names by its first. `put` stores one bucket and returns its reference
    (default: Ray's object store, where the buckets live as long as somebody holds the result).
    """
    if put is None:
        import ray

        put = ray.put
    references: list[Any] = []
    entries: list[WeightEntry] = []
    for bucket in pack_stream(named, bucket_bytes, aliases=aliases):
        references.append(put(as_array(bucket.data)))
        entries.extend(bucket.entries)
    return PublishedWeights(version, Manifest(tuple(entries)), tuple(references))


def joined(shares: Sequence[PublishedWeights]) -> PublishedWeights:
    """One publication of what the ranks of a trainer have published between them; tensor after tensor."""
    entries: list[WeightEntry] = []
    references: list[Any] = []
    for share in shares:
        entries.extend(replace(entry, bucket=entry.bucket + len(references)) for entry in share.manifest.entries)
        references.extend(share.buckets)
    return PublishedWeights(shares[0].version, Manifest(tuple(entries)), tuple(references), known=shares[0].known)


def unpack(buckets: Sequence[Bytes], manifest: Manifest) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
    """The tensors, as views of the buckets (no copy). They may lie in read-only shared memory: never write to them."""
    for index, entries, _ in _by_bucket(manifest):
        yield from views(_as_tensor(buckets[index]), entries)


def stream(
    published: PublishedWeights,
    *,
    timeout_s: float = 60.0,
    fetch: Fetch | None = None,
    wanted: Wanted | None = None,
) -> Iterator[tuple[WeightEntry, torch.Tensor]]:
    """Pull bucket by bucket and yield each tensor whole and read-only; for executors with a loader of their own.

    A tensor that lies whole in a bucket is a view of it, others are put together in host memory. Of one of which only
    a part is `wanted` the rest is undefined, and was never written to.
    """
    missing = Counter(entry.name for entry in published.manifest.entries)
    begun: dict[str, torch.Tensor] = {}
    aliases = {entry.name: entry.aliases for entry in published.manifest.entries}
    with closing(_arriving(published, timeout_s, fetch)) as buckets:
        for bucket in buckets:
            for entry, view in views(bucket.flat, bucket.entries):
                if entry.box is None:
                    yield entry, view
                    continue
                if entry.name not in begun:
                    begun[entry.name] = torch.empty(entry.shape, dtype=view.dtype)
                for box in (entry.box,) if wanted is None else _in_both(entry.box, wanted[entry.name]):
                    start = [first - begin for (first, _), (begin, _) in zip(box, entry.box, strict=True)]
                    begun[entry.name][slices(box)] = part_of(view, start, extent(box))
                missing[entry.name] -= 1
                if not missing[entry.name]:
                    yield replace(entry, box=None, aliases=aliases[entry.name]), begun.pop(entry.name)


def needed_bytes(published: PublishedWeights, wanted: Wanted) -> int:
    """Of what is published: the bytes of the parts that are wanted."""
    return sum(
        elements(box) * itemsize(entry.dtype)
        for entry in published.manifest.entries
        for box in _in_both(whole(entry.shape) if entry.box is None else entry.box, wanted[entry.name])
    )


def _in_both(box: Box, wanted: Sequence[Box]) -> list[Box]:
    return [both for part in wanted if (both := common(box, part)) is not None]


def apply(
    model: torch.nn.Module, published: PublishedWeights, *, timeout_s: float = 60.0, fetch: Fetch | None = None
) -> int:
    """Copy published weights into a model in place, after every name, shape and dtype was found to agree; the bytes.

    Each name of the model's state dict must be published, and each published tensor must have a place in the model.
    A model that ties weights takes a tied tensor once. dtypes must agree, unless both are floating point: then the
    copy converts, which is how a trainer in float32 feeds a bfloat16 replica.

    Raises:
        WeightSyncError: lists every missing, unknown, mis-shaped and conflicting name, or the first bucket did not
            arrive; the model is unchanged.
        WaitTimeoutError, TransferError: a later bucket did not arrive; the model may be partly updated.
    """
    targets = targets_of(model, published)
    devices = {target.device for target in targets.values()}
    moved = 0
    with torch.no_grad(), closing(_arriving(published, timeout_s, fetch)) as buckets:
        for bucket in buckets:
            if len(bucket.entries) > 1 and len(devices) == 1 and bucket.flat.device not in devices:
                flat = bucket.flat.to(next(iter(devices)))  # one transfer instead of one for each tensor
                Contents(flat, bucket.entries, bucket.runs).copy_to(targets)
            else:
                bucket.copy_to(targets)
            moved += sum(run.stop - run.start for run in bucket.runs)
    return moved


def check(model: torch.nn.Module, published: PublishedWeights) -> None:
    """Raise the `WeightSyncError` that `apply` would raise; the model may be on meta."""
    targets_of(model, published)


def pulled(published: PublishedWeights, *, timeout_s: float = 60.0, fetch: Fetch | None = None) -> PublishedWeights:
    """The same weights with the buckets' bytes in place of references, for processes that Ray does not know."""
    buckets = tuple(_fetch(published, index, timeout_s, fetch) for index in range(len(published.buckets)))
    return replace(published, buckets=buckets)


class NodeWeights:
    """The same for processes of this node beside this one: buckets in memory that they can map, until `close`."""

    def __init__(self, published: PublishedWeights, *, timeout_s: float = 60.0) -> None:
        self._memory: list[HostMemory] = []
        try:
            for index in range(len(published.buckets)):
                bucket = _as_tensor(_fetch(published, index, timeout_s, None))
                self._memory.append(HostMemory(bucket.nbytes))
                self._memory[-1].data.copy_(bucket)
        except BaseException:  # raised again
            self.close()
            raise
        self.published = replace(published, buckets=tuple(memory.handle for memory in self._memory))

    def close(self) -> None:
        """Who has mapped a bucket keeps it."""
        for memory in self._memory:
            memory.close()


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


class _Writable:
    """Lends a read-only array's memory as writable, because torch warns of any other; keeps the array alive."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _as_tensor(data: Bytes) -> torch.Tensor:
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Writable(data)))


def _arriving(published: PublishedWeights, timeout_s: float, fetch: Fetch | None) -> Generator[Contents]:
    """Bucket after bucket, pulled from where they were put."""
    for number, (index, entries, runs) in enumerate(_by_bucket(published.manifest)):
        try:
            data = _fetch(published, index, timeout_s, fetch)
        except RlixError as error:
            if number:
                raise
            raise WeightSyncError(f"weights did not arrive, and nothing was changed: {error}") from error
        yield Contents(_as_tensor(data), entries, runs)


@lru_cache(maxsize=4)
def _by_bucket(manifest: Manifest) -> list[tuple[int, list[WeightEntry], tuple[Run, ...]]]:
    """The buckets, those that hold the same tensor near each other."""
    groups: dict[int, list[WeightEntry]] = {}
    place: dict[str, int] = {}
    for entry in manifest.entries:
        groups.setdefault(entry.bucket, []).append(entry)
        place.setdefault(entry.name, len(place))
    found = sorted(groups.items(), key=lambda group: (place[group[1][0].name], group[0]))
    return [(index, entries, runs_of(entries)) for index, entries in found]


@lru_cache(maxsize=4)
def _bucket_sizes(manifest: Manifest) -> dict[int, int]:
    return {index: sum(entry.nbytes for entry in entries) for index, entries, _ in _by_bucket(manifest)}


def _fetch(published: PublishedWeights, index: int, timeout_s: float, fetch: Fetch | None) -> Bytes:
    """`timeout_s`: for a bucket of no size; a tensor that travels alone may be of gigabytes."""
    reference = published.buckets[index]
    timeout_s = loading_s(_bucket_sizes(published.manifest)[index], timeout_s)
    if fetch is not None:
        return fetch(reference, timeout_s)
    if isinstance(reference, np.ndarray):
        return reference
    if isinstance(reference, str):  # of `NodeWeights`
        mapped: Bytes = opened_host(reference).numpy()
        return mapped
    try:
        # Unlike `ray.get`, this may be called in a thread of an async actor, which replicas are.
        data: Bytes = reference.future().result(timeout=timeout_s)
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"bucket {index} of {len(published.buckets)} of weight version {published.version} did not arrive within "
            f"{timeout_s:g} s from Ray's object store (owner: the trainer that published it)"
        ) from error
    except RayError as error:
        raise TransferError(
            f"bucket {index} of {len(published.buckets)} of weight version {published.version} is lost: the workers "
            "that published it have ended; publish again"
        ) from error
    return data


def targets_of(model: torch.nn.Module, published: PublishedWeights) -> dict[str, torch.Tensor]:
    """Where each published tensor goes in the model, by its first name; every disagreement in one error."""
    named = without_adapters(named_weights(model))
    known: set[str] = set()
    problems: list[str] = []
    taken: dict[int, str] = {}
    targets: dict[str, torch.Tensor] = {}
    for entry in {entry.name: entry for entry in published.manifest.entries}.values():
        names = entry.names
        known.update(names)
        places = {id(place): place for name in names if (place := named.get(name)) is not None}
        if not places:
            problems.append(f"unknown here: {entry.name}")
            continue
        if len(places) > 1:
            problems.append(f"tied by the trainer, separate here: {', '.join(names)}")
        first, place = next(iter(places.items()))
        target = local_tensor(place)
        other = taken.setdefault(first, entry.name)
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
    if target.shape != entry.shape:
        return [f"shape of {entry.name}: published {list(entry.shape)}, here {list(target.shape)}"]
    published = getattr(torch, entry.dtype)
    if target.dtype != published and not (target.dtype.is_floating_point and published.is_floating_point):
        return [f"dtype of {entry.name}: published {entry.dtype}, here {dtype_name(target.dtype)}"]
    return []
