"""A training state that passes from one set of ranks to another through host memory, whatever the two layouts.

Each rank packs what it holds into buckets, as it does to publish weights. A rank of the new layout copies the
intersections with its own boxes. No rank has to hold a whole tensor, and nobody has to agree
on anything: ranks that wait for each other in vain can still hand over what they have.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch.distributed.tensor import DTensor, Replicate

from rlix.engine.residency import local_tensor
from rlix.engine.weights import buckets, publication
from rlix.engine.weights.boxes import Box, Piece, common, elements, extent, moved, whole
from rlix.engine.weights.buckets import Bytes, Manifest, WeightSlice, part_of
from rlix.engine.weights.shards import pieces_of
from rlix.protocol.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class Handover:
    """One rank's part; `shared` and `random_state` are JSON, as in `checkpoint.Snapshot`.

    The bytes are in it: what a rank puts into Ray's store is lost when it is ended.
    """

    buckets: Sequence[Bytes]
    manifest: Manifest
    shared: str
    random_state: str


def pack(named: Mapping[str, torch.Tensor], rank: int, lost: Collection[int] = ()) -> tuple[Sequence[Bytes], Manifest]:
    """What this rank is the first to hold of those that are not `lost`: of copies of a shard, or of a whole tensor, one
    is packed."""
    return buckets.pack(
        (WeightSlice(name, tuple(tensor.shape), part.box), part_of(local_tensor(tensor), part.at, extent(part.box)))
        for name, tensor in named.items()
        if rank == _first(tensor, lost)
        for part in pieces_of(tensor, name)
    )


def unpack(named: Mapping[str, torch.Tensor], given: Iterable[Handover]) -> None:
    """Fill this rank's tensors.

    Raises:
        WeightSyncError: names what nobody handed over, or only in part.
    """
    sources: dict[str, dict[Box, torch.Tensor]] = {}
    for part in given:
        for entry, view in publication.unpack(part.buckets, part.manifest):
            sources.setdefault(entry.name, {})[whole(entry.shape) if entry.box is None else entry.box] = view
    problems = []
    with torch.no_grad():
        for name, tensor in named.items():
            if missing := _fill(tensor, name, sources.get(name, {})):
                problems.append(f"{name}: {missing} element(s)")
    if problems:
        raise WeightSyncError("the state that was handed over does not cover " + "; ".join(problems))


def _fill(tensor: torch.Tensor, name: str, sources: Mapping[Box, torch.Tensor]) -> int:
    """The number of elements that no source has."""
    missing = 0
    for piece in pieces_of(tensor, name):
        missing += elements(piece.box)
        for box, values in sources.items():
            both = common(piece.box, box) if len(box) == len(piece.box) else None
            if both is not None:
                held = part_of(values, moved(both, Piece(box, name, (0,) * len(box))), extent(both))
                part_of(local_tensor(tensor), moved(both, piece), extent(both)).copy_(held)
                missing -= elements(both)
    return missing


def _first(tensor: torch.Tensor, lost: Collection[int]) -> int | None:
    """The first rank that holds what this one does of a tensor; None where this one holds nothing."""
    if not isinstance(tensor, DTensor):
        return next(rank for rank in count() if rank not in lost)
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return None
    copies = tuple(
        slice(None) if isinstance(how, Replicate) else at for how, at in zip(tensor.placements, place, strict=True)
    )
    ranks: list[int] = tensor.device_mesh.mesh[copies].flatten().tolist()
    return next(rank for rank in ranks if rank not in lost)
