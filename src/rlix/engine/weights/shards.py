"""What a rank holds of tensors that PyTorch spreads over ranks, and how an engine's ranks publish it between them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rlix.engine.residency import local_tensor
from rlix.engine.weights.buckets import Manifest, WeightEntry, WeightSlice, dtype_name
from rlix.engine.weights.layout import Box, Cut, Layout, Part, Piece, shard, whole
from rlix.engine.weights.plan import plan
from rlix.engine.weights.streams import Held, cut_out


class Weight(Protocol):
    """One tensor that a rank shows others, whole or as its shard; `base` has its name, dtype, shape and placements."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def base(self) -> torch.Tensor: ...

    @property
    def tensor(self) -> Callable[[], torch.Tensor]: ...


Share = tuple[tuple[str, Box], ...]
"""What one rank publishes: boxes by the names of their tensors."""


def layout_of(weights: Iterable[Weight]) -> Layout:
    return Layout(
        {w.name: Part(dtype_name(w.base.dtype), tuple(w.base.shape), pieces_of(w.base, w.name)) for w in weights}
    )


def held(weight: Weight) -> Held:
    """The tensor's pieces in this process. Where it is computed from others, all ranks call this in the same order."""
    tensor = weight.tensor().detach()
    return [(piece, local_tensor(tensor)) for piece in pieces_of(tensor, weight.name)]


def pieces_of(tensor: torch.Tensor, name: str) -> tuple[Piece, ...]:
    """What this process has of a tensor, which may be a DTensor.

    Raises:
        NotImplementedError: of a kind that nobody holds right parts of (partial sums).
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return (Piece(whole(shape), name, (0,) * len(shape)),) if tensor.numel() else ()
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return ()
    cuts = tuple(_cut(placement, name) for placement in tensor.placements)
    return _shard(shape, tuple(tensor.device_mesh.shape), cuts, tuple(place), name)


_shard = cache(shard)


def _cut(placement: object, name: str) -> Cut | None:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):
        return Cut(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Cut(placement.dim)
    raise NotImplementedError(f"{name} is spread over ranks as {placement}, of which no rank holds a part")


def described(layouts: Sequence[Layout], aliases: Mapping[str, tuple[str, ...]]) -> Manifest:
    """The whole tensors that these hold between them."""
    parts = {name: part for layout in layouts for name, part in layout.parts.items()}
    return Manifest(
        tuple(WeightEntry(name, part.dtype, part.shape, 0, 0, aliases.get(name, ())) for name, part in parts.items())
    )


def everything(manifest: Manifest, node: str = "") -> Layout:
    """The layout of somebody who needs whole tensors as they are."""
    return Layout({entry.name: _all_of(entry.name, entry.dtype, entry.shape) for entry in manifest.entries}, node)


def _all_of(name: str, dtype: str, shape: tuple[int, ...]) -> Part:
    full = Piece(whole(shape), name, (0,) * len(shape))
    return Part(dtype, shape, (full,) if 0 not in shape else ())


def whole_layout(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Of a process that has each of these tensors whole."""
    return Layout({n: _all_of(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()})


def shares(layouts: Sequence[Layout], manifest: Manifest) -> list[Share]:
    """Who publishes what, so that each element is published once, by somebody who holds it.

    Raises:
        WeightSyncError: a part is held by nobody.
    """
    made = plan(layouts, [everything(manifest)])
    rows: list[list[tuple[str, Box]]] = [[] for _ in layouts]
    for transfer in made.transfers:
        rows[transfer.source].append((transfer.name, transfer.box))
    return [tuple(row) for row in rows]


def sliced(weights: Iterable[Weight], share: Share) -> Iterable[tuple[WeightSlice, torch.Tensor]]:
    """A rank's share, tensor after tensor, to be packed."""
    wanted: dict[str, list[Box]] = {}
    for name, box in share:
        wanted.setdefault(name, []).append(box)
    for weight in weights:
        pieces = held(weight)  # also of what others publish: it may be computed together
        shape = tuple(weight.base.shape)
        for box in wanted.get(weight.name, ()):
            part = None if box == whole(shape) else box
            yield WeightSlice(weight.name, shape, part), cut_out(box, pieces)
