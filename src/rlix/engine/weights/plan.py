"""Who sends which part of which tensor to whom. Pure: layouts in, transfers out.

Every element that a target needs comes to it once, from a source that holds it, in the smaller of the two dtypes. Of
several sources that hold the same, one on the target's node is taken, and among those the one with the least to send.
Targets on one node that need the same have the same source, which writes it once where they all read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from rlix.engine.weights.buckets import itemsize
from rlix.engine.weights.layout import Box, Layout, Part, Piece, common, elements, moved, slices, without
from rlix.protocol.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box begins in one of a process's own tensors."""

    local: str
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box of one tensor, from one process to another. `dtype` is what it travels in."""

    name: str
    box: Box
    dtype: str
    source: int
    taken: Place
    target: int
    put: Place

    @property
    def nbytes(self) -> int:
        return elements(self.box) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Plan:
    """In the order in which everyone sends and receives: tensor by tensor."""

    transfers: tuple[Transfer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that reach targets."""
        return sum(transfer.nbytes for transfer in self.transfers)


def plan(sources: Sequence[Layout], targets: Sequence[Layout]) -> Plan:
    """The transfers that give every target what it needs.

    Raises:
        WeightSyncError: lists what no source holds, or holds in another shape.
    """
    holders = _holders(sources)
    load = [0] * len(sources)
    problems: list[str] = []
    transfers: list[Transfer] = []
    shared: dict[tuple[str, str, Box, str], int] = {}
    names = dict.fromkeys(name for layout in (*sources, *targets) for name in layout.parts)
    for name in names:
        for index, target in enumerate(targets):
            part = target.parts.get(name)
            if part is None:
                continue
            problem = _mismatch(name, part, sources)
            if problem is not None:
                problems.append(problem)
                continue
            for piece in part.pieces:
                left = [piece.box]
                for held, ranks in holders[name].items():
                    for box in (box for box in (common(rest, held) for rest in left) if box is not None):
                        source = _choose(name, box, target.node, part.dtype, ranks, sources, load, shared)
                        transfers.append(_transfer(name, box, source, sources[source].parts[name], index, piece, part))
                    left = [rest for box in left for rest in without(box, held)]
                problems.extend(f"held by nobody: {name}{_shown(box)}" for box in left)
    if problems:
        raise WeightSyncError(
            "weights do not reach everyone; nothing was changed: " + "; ".join(dict.fromkeys(problems))
        )
    return Plan(tuple(transfers))


def least_bytes(sources: Sequence[Layout], targets: Sequence[Layout]) -> int:
    """Bytes that must reach targets at least: each element that one needs, once, in the smaller dtype.

    Counted element by element, apart from how `plan` finds its transfers; for checks, and not for large models.
    """
    total = 0
    for target in targets:
        for name, part in target.parts.items():
            needed = np.zeros(part.shape, dtype=bool)
            for piece in part.pieces:
                needed[slices(piece.box)] = True
            held = {source.parts[name].dtype for source in sources if name in source.parts}
            total += int(needed.sum()) * min(itemsize(dtype) for dtype in (*held, part.dtype))
    return total


def _holders(sources: Sequence[Layout]) -> Mapping[str, dict[Box, list[int]]]:
    """Of each tensor the boxes that are held, and by whom."""
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, source in enumerate(sources):
        for name, part in source.parts.items():
            boxes = holders.setdefault(name, {})
            for piece in part.pieces:
                boxes.setdefault(piece.box, []).append(rank)
    return holders


def _choose(
    name: str,
    box: Box,
    node: str,
    dtype: str,
    ranks: Sequence[int],
    sources: Sequence[Layout],
    load: list[int],
    shared: dict[tuple[str, str, Box, str], int],
) -> int:
    """Who sends a box to a node; notes what that adds to the load."""
    key = (name, node, box, dtype)
    if key in shared:
        return shared[key]
    source = min(ranks, key=lambda rank: (sources[rank].node != node, load[rank], rank))
    load[source] += elements(box) * itemsize(wire_dtype(sources[source].parts[name].dtype, dtype))
    shared[key] = source
    return source


def _transfer(name: str, box: Box, source: int, held: Part, target: int, piece: Piece, part: Part) -> Transfer:
    mine = next(piece for piece in held.pieces if common(piece.box, box) == box)
    return Transfer(
        name,
        box,
        wire_dtype(held.dtype, part.dtype),
        source,
        Place(mine.local, moved(box, mine)),
        target,
        Place(piece.local, moved(box, piece)),
    )


def wire_dtype(source: str, target: str) -> str:
    """The smaller one: either side converts in the same way, so it is done where it saves bytes."""
    return target if itemsize(target) <= itemsize(source) else source


def _mismatch(name: str, part: Part, sources: Sequence[Layout]) -> str | None:
    held = [source.parts[name] for source in sources if name in source.parts]
    if not held:
        return f"held by nobody: {name}"
    for other in held:
        if other.shape != part.shape:
            return f"shape of {name}: held {list(other.shape)}, needed {list(part.shape)}"
        if other.dtype != part.dtype and not (_floats(other.dtype) and _floats(part.dtype)):
            return f"dtype of {name}: held {other.dtype}, needed {part.dtype}"
    return None


@cache
def _floats(dtype: str) -> bool:
    floating: bool = getattr(torch, dtype).is_floating_point
    return floating


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
