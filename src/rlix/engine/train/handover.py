"""A training state that passes from one set of ranks to another through host memory, whatever the two layouts.

Each rank packs what it holds into one flat buffer and says which box of which tensor each stretch of it is. A rank of
the new layout copies the intersections with its own boxes. No rank has to hold a whole tensor, and nobody has to agree
on anything: ranks that wait for each other in vain can still hand over what they have.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate

from rlix.engine.residency import local_tensor
from rlix.engine.weights.buckets import ALIGNMENT, dtype_name, part_of
from rlix.engine.weights.layout import Box, Piece, common, elements, extent, moved
from rlix.engine.weights.shards import pieces_of
from rlix.protocol.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class Stretch:
    """A box of a named tensor and where its bytes begin in the buffer."""

    name: str
    dtype: str
    box: Box
    offset: int


@dataclass(frozen=True, slots=True)
class Handover:
    """One rank's part; `shared` and `random_state` are JSON, as in `checkpoint.Snapshot`."""

    pieces: tuple[Stretch, ...]
    data: NDArray[np.uint8]
    shared: str
    random_state: str


def pack(named: Mapping[str, torch.Tensor], rank: int) -> tuple[tuple[Stretch, ...], NDArray[np.uint8]]:
    """What this rank is the first to hold: of copies of a shard one is packed, of whole tensors rank 0's."""
    pieces: list[Stretch] = []
    values: list[torch.Tensor] = []
    end = 0
    for name, tensor in named.items():
        for part in pieces_of(tensor, name) if _is_first(tensor, rank) else ():
            pieces.append(Stretch(name, dtype_name(tensor.dtype), part.box, end))
            values.append(part_of(local_tensor(tensor).detach(), part.at, extent(part.box)))
            end += -(-elements(part.box) * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    data = torch.empty(end, dtype=torch.uint8)
    for piece, value in zip(pieces, values, strict=True):
        _view(data, piece).copy_(value)
    return tuple(pieces), data.numpy()


def unpack(named: Mapping[str, torch.Tensor], given: Iterable[Handover]) -> None:
    """Fill this rank's tensors.

    Raises:
        WeightSyncError: names what nobody handed over, or only in part.
    """
    sources: dict[str, dict[Box, torch.Tensor]] = {}
    for part in given:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # it lies in read-only shared memory
            flat = torch.from_numpy(part.data)
        for piece in part.pieces:
            sources.setdefault(piece.name, {})[piece.box] = _view(flat, piece)
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


def _is_first(tensor: torch.Tensor, rank: int) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == 0
    place = tensor.device_mesh.get_coordinate()
    return place is not None and all(
        not isinstance(how, Replicate) or at == 0 for how, at in zip(tensor.placements, place, strict=True)
    )


def _view(flat: torch.Tensor, piece: Stretch) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    nbytes = elements(piece.box) * dtype.itemsize
    return flat[piece.offset : piece.offset + nbytes].view(dtype).view(extent(piece.box))
