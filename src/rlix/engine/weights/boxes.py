"""Which parts of which tensors a process holds or needs. Pure: shapes and numbers, no tensors and no processes.

A part is a *box* of the whole tensor: the tensor as a checkpoint names and shapes it, whatever a process makes of it.
So parameters that a backend fuses (`qkv_proj` of three) are several boxes that lie one after the other in one local
tensor, and a fused one of the trainer's fits a separate one of a replica's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

_repeated = lru_cache(2**14)
"""Layers have the same shapes: what is asked of the boxes of one is asked of all of them."""

Box = tuple[tuple[int, int], ...]
"""Start and stop in each dimension; `()` is all of a tensor without dimensions."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dimension of a mesh of ranks cuts a tensor: dimension `dim` in chunks of equal size, the last shorter.

    With a `stride` it is cut as if in so many parts first, and each of those in chunks: what FSDP2 does to what tensor
    parallelism has already cut.
    """

    dim: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where it lies in a process: in its tensor `local`, from `at` on."""

    box: Box
    local: str
    at: tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


@_repeated
def extent(box: Box) -> tuple[int, ...]:
    """The shape of what is in a box."""
    return tuple([stop - start for start, stop in box])


@_repeated
def elements(box: Box) -> int:
    return math.prod(extent(box))


@_repeated
def slices(box: Box) -> tuple[slice, ...]:
    """As a tensor is indexed."""
    return tuple([slice(*side) for side in box])


@_repeated
def common(a: Box, b: Box) -> Box | None:
    """What is in both; None when nothing is."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


@_repeated
def without(a: Box, b: Box) -> tuple[Box, ...]:
    """What of `a` is outside `b`, as boxes that do not overlap."""
    inner = common(a, b)
    if inner is None:
        return (a,)
    left: list[Box] = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(a, inner, strict=True)):
        sides = (side for side in ((start, first), (last, stop)) if side[0] < side[1])
        left.extend((*inner[:dim], side, *a[dim + 1 :]) for side in sides)
    return tuple(left)


def moved(box: Box, piece: Piece) -> tuple[int, ...]:
    """Where a box inside a piece begins in the piece's local tensor."""
    return tuple([at + start - first for at, (start, _), (first, _) in zip(piece.at, box, piece.box, strict=True)])


def pieces_on_mesh(
    shape: Sequence[int], mesh: Sequence[int], cuts: Sequence[Cut | None], place: Sequence[int], local: str
) -> tuple[Piece, ...]:
    """What the rank at `place` of a mesh holds, cut by each of the mesh's dimensions in turn (None: not cut).

    This is what a DTensor's placements mean: `Shard(0)` is `Cut(0)`, `Replicate()` is None.
    """
    runs: list[list[tuple[int, int]]] = [[(0, size)] for size in shape]
    for size, cut, index in zip(mesh, cuts, place, strict=True):
        if cut is not None:
            parts = [_chunk(runs[cut.dim], cut.stride, part) for part in range(cut.stride)]
            runs[cut.dim] = [run for part in parts for run in _chunk(part, size, index)]
    placed = [list(zip(row, _ends(row), strict=True)) for row in runs]
    return tuple(
        Piece(box, local, tuple(at for _, at in choice))
        for choice in product(*placed)
        if elements(box := tuple(run for run, _ in choice))
    )


def _chunk(runs: Sequence[tuple[int, int]], count: int, index: int) -> list[tuple[int, int]]:
    """Of the rows in these runs, in order, chunk `index` of `count`, as `torch.chunk` makes them."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // count)
    first, last = min(index * size, total), min((index + 1) * size, total)
    chosen = []
    for (start, stop), before in zip(runs, _ends(runs), strict=True):
        begin, end = max(first - before, 0), min(last - before, stop - start)
        if begin < end:
            chosen.append((start + begin, start + end))
    return chosen


def _ends(runs: Sequence[tuple[int, int]]) -> list[int]:
    """How many rows are before each run."""
    ends = [0]
    for start, stop in runs:
        ends.append(ends[-1] + stop - start)
    return ends[:-1]
