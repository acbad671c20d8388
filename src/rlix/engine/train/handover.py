"""A training state that passes from one set of ranks to another through host memory, whatever the two layouts.

Each rank packs what it holds into one flat buffer and says which box of which tensor each stretch of it is. A rank of
the new layout copies the intersections with its own boxes. No rank has to hold a whole tensor, and nobody has to agree
on anything: ranks that wait for each other in vain can still hand over what they have.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlix.engine.residency import local_tensor
from rlix.engine.weights.buckets import dtype_name
from rlix.protocol.errors import WeightSyncError

_ALIGN = 16  # bytes; no element is larger


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: its first index and its size along each dimension."""

    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.size)

    def intersection(self, other: "Box") -> "Box | None":
        """What both cover, in indices of the whole tensor."""
        begin = tuple(max(a, b) for a, b in zip(self.begin, other.begin, strict=True))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.begin, self.size, other.begin, other.size, strict=True))
        size = tuple(end - first for first, end in zip(begin, ends, strict=True))
        return Box(begin, size) if all(length > 0 for length in size) else None

    def of(self, tensor: torch.Tensor, inner: "Box") -> torch.Tensor:
        """The view of `inner` in a tensor that holds this box."""
        for dim, (mine, first, length) in enumerate(zip(self.begin, inner.begin, inner.size, strict=True)):
            tensor = tensor.narrow(dim, first - mine, length)
        return tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a named tensor and where its bytes begin in the buffer."""

    name: str
    dtype: str
    box: Box
    offset: int


@dataclass(frozen=True, slots=True)
class Handover:
    """One rank's part; `shared` and `random_state` are JSON, as in `checkpoint.Snapshot`."""

    pieces: tuple[Piece, ...]
    data: NDArray[np.uint8]
    shared: str
    random_state: str


def pack(named: Mapping[str, torch.Tensor], rank: int) -> tuple[tuple[Piece, ...], NDArray[np.uint8]]:
    """What this rank is the first to hold: of copies of a shard one is packed, of whole tensors rank 0's."""
    mine = {name: tensor for name, tensor in named.items() if _is_first(tensor, rank)}
    pieces, end = [], 0
    for name, tensor in mine.items():
        pieces.append(Piece(name, dtype_name(tensor.dtype), box_of(tensor), end))
        local = local_tensor(tensor)
        end += -(-local.numel() * local.element_size() // _ALIGN) * _ALIGN
    data = torch.empty(end, dtype=torch.uint8)
    for piece, tensor in zip(pieces, mine.values(), strict=True):
        _view(data, piece).copy_(local_tensor(tensor).detach())
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
            if missing := _fill(tensor, sources.get(name, {})):
                problems.append(f"{name}: {missing} element(s)")
    if problems:
        raise WeightSyncError("the state that was handed over does not cover " + "; ".join(problems))


def box_of(tensor: torch.Tensor) -> Box:
    """Which part of the whole tensor this rank's memory is."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    size, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(begin), tuple(size))


def _fill(tensor: torch.Tensor, sources: Mapping[Box, torch.Tensor]) -> int:
    """The number of elements that no source has."""
    box, local = box_of(tensor), local_tensor(tensor)
    missing = box.volume
    for place, values in sources.items():
        common = box.intersection(place) if len(place.size) == len(box.size) else None
        if common is not None:
            box.of(local, common).copy_(place.of(values, common))
            missing -= common.volume
    return missing


def _is_first(tensor: torch.Tensor, rank: int) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == 0
    place = tensor.device_mesh.get_coordinate()
    return place is not None and all(
        not isinstance(how, Replicate) or at == 0 for how, at in zip(tensor.placements, place, strict=True)
    )


def _view(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    nbytes = piece.box.volume * dtype.itemsize
    return flat[piece.offset : piece.offset + nbytes].view(dtype).view(piece.box.size)
