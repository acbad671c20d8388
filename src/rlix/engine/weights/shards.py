"""What a rank holds of tensors that PyTorch spreads over ranks, and how an engine's ranks publish it between them."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rlix.engine.residency import local_tensor
from rlix.engine.weights.boxes import Box, Cut, Piece, common, elements, extent, moved, pieces_on_mesh, whole, without
from rlix.engine.weights.buckets import WeightSlice, dtype_name, itemsize, part_of
from rlix.protocol.errors import WeightSyncError


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


Held = Sequence[tuple[Piece, torch.Tensor]]
"""What a process holds of one tensor: pieces, and the local tensors that they lie in."""
HeldRow = tuple[str, str, tuple[int, ...], tuple[Box, ...]]
"""Of one tensor: its name, dtype and shape, and which boxes of it a rank holds. Thousands are sent, so plain tuples."""
Share = tuple[tuple[str, Box], ...]
"""What one rank publishes: boxes by the names of their tensors."""


def held_rows(weights: Iterable[Weight]) -> list[HeldRow]:
    return [
        (w.name, dtype_name(w.base.dtype), tuple(w.base.shape), tuple(p.box for p in pieces_of(w.base, w.name)))
        for w in weights
    ]


def held(weight: Weight) -> Held:
    """The tensor's pieces in this process. Where it is computed from others, all ranks call this in the same order."""
    tensor = weight.tensor().detach()
    return [(piece, local_tensor(tensor)) for piece in pieces_of(tensor, weight.name)]


def cut_out(box: Box, held: Held) -> torch.Tensor:
    """A box out of the local tensor that it lies in.

    Raises:
        WeightSyncError: it is in none of them.
    """
    for piece, tensor in held:
        if common(piece.box, box) == box:
            return part_of(tensor, moved(box, piece), extent(box))
    raise WeightSyncError(f"{box} is not held here: weights are laid out in another way than when they were planned")


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
    return _pieces(shape, tuple(tensor.device_mesh.shape), cuts, tuple(place), name)


_pieces = cache(pieces_on_mesh)


def _cut(placement: object, name: str) -> Cut | None:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):
        return Cut(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Cut(placement.dim)
    raise NotImplementedError(f"{name} is spread over ranks as {placement}, of which no rank holds a part")


def shares(held: Sequence[Sequence[HeldRow]]) -> list[Share]:
    """Who publishes what of what the ranks hold: each element once, from the rank with the least to publish so far.

    Raises:
        WeightSyncError: lists what no rank holds, or ranks hold in several shapes or dtypes.
    """
    of_name: dict[str, list[tuple[int, HeldRow]]] = {}
    for rank, rows in enumerate(held):
        for row in rows:
            of_name.setdefault(row[0], []).append((rank, row))
    load, mine = [0] * len(held), [list[tuple[str, Box]]() for _ in held]
    problems: list[str] = []
    for name, found in of_name.items():
        kinds = {(dtype, shape) for _, (_, dtype, shape, _) in found}
        (dtype, shape), *others = sorted(kinds)
        if others:
            problems.append(f"ranks hold {name} as " + " and as ".join(f"{d} {list(s)}" for d, s in sorted(kinds)))
            continue
        holders: dict[Box, list[int]] = {}
        for rank, (_, _, _, boxes) in found:
            for box in boxes:
                holders.setdefault(box, []).append(rank)
        left = [whole(shape)] if 0 not in shape else []
        for box, ranks in holders.items():
            for part in (part for part in (common(rest, box) for rest in left) if part is not None):
                rank = min(ranks, key=lambda rank: (load[rank], rank))
                load[rank] += elements(part) * itemsize(dtype)
                mine[rank].append((name, part))
            left = [rest for part in left for rest in without(part, box)]
        problems.extend(f"held by nobody: {name}{_shown(box)}" for box in left)
    if problems:
        raise WeightSyncError("the ranks do not hold all weights between them: " + "; ".join(problems))
    return [tuple(rows) for rows in mine]


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


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
