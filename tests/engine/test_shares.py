"""What ranks publish between them, for random ways to spread tensors over them."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.weights.boxes import Box, Cut, common, elements, pieces_on_mesh, without
from rlix.engine.weights.shards import HeldRow, shares
from rlix.protocol.errors import WeightSyncError

Shape = tuple[int, ...]


def meshed(
    tensors: dict[str, Shape], mesh: Sequence[int], cuts: Callable[[str], Sequence[Cut | None]], dtype: str = "float32"
) -> list[list[HeldRow]]:
    """What each rank of a mesh holds, whose dimensions cut each tensor as `cuts` says."""
    return [
        [
            (name, dtype, shape, tuple(piece.box for piece in pieces_on_mesh(shape, mesh, cuts(name), place, name)))
            for name, shape in tensors.items()
        ]
        for place in itertools.product(*map(range, mesh))
    ]


def test_fsdp_cuts_rows_and_the_last_shard_may_be_short_or_absent() -> None:
    ranks = meshed({"w": (5, 2), "b": (2,)}, (4,), lambda _: [Cut(0)])
    assert [[boxes for _, _, _, boxes in rows] for rows in ranks] == [
        [(((0, 2), (0, 2)),), (((0, 1),),)],
        [(((2, 4), (0, 2)),), (((1, 2),),)],
        [(((4, 5), (0, 2)),), ()],
        [(), ()],
    ]


def test_fsdp_on_top_of_tensor_parallelism_cuts_each_rank_part_again() -> None:
    places = ((0, 0), (0, 1), (1, 0), (1, 1))
    pieces = [pieces_on_mesh((8,), (2, 2), [Cut(0, stride=2), Cut(0)], place, "w") for place in places]
    assert [[piece.box for piece in row] for row in pieces] == [[((0, 2),)], [((4, 6),)], [((2, 4),)], [((6, 8),)]]


def test_copies_share_the_work() -> None:
    copies = meshed({f"t{i}": (4, 2) for i in range(6)}, (3,), lambda _: [None])
    assert [len(share) for share in shares(copies)] == [2, 2, 2]


def test_what_the_ranks_do_not_hold_between_them_is_listed() -> None:
    rows: list[list[HeldRow]] = [
        [("a", "float32", (2, 2), (((0, 2), (0, 2)),)), ("d", "float32", (4,), (((0, 3),),)), ("e", "int64", (0,), ())],
        [("a", "bfloat16", (2, 2), (((0, 2), (0, 2)),))],
    ]
    with pytest.raises(WeightSyncError) as caught:
        shares(rows)
    for problem in ("ranks hold a as bfloat16 [2, 2] and as float32 [2, 2]", "held by nobody: d[3:4]"):
        assert problem in str(caught.value)


boxes = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda ends: (min(ends), max(ends))), min_size=2, max_size=2
)


@given(boxes.map(tuple), boxes.map(tuple))
def test_what_is_left_of_a_box_is_what_the_other_does_not_cover(a: Box, b: Box) -> None:
    def cells(box: Box) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(*side) for side in box)))

    left = without(a, b) if elements(a) else []
    assert sorted(cell for box in left for cell in cells(box)) == sorted(cells(a) - cells(b))


# ---- random layouts ------------------------------------------------------------------------------------------------

HIDDEN, HEAD = 4, 2


def model(layers: int, heads: int, kv_heads: int) -> dict[str, Shape]:
    """Shapes by name, as in a checkpoint."""
    shapes: dict[str, Shape] = {"embed": (7, HIDDEN), "scale": ()}
    for i in range(layers):
        shapes |= {
            f"{i}.q": (heads * HEAD, HIDDEN),
            f"{i}.k": (kv_heads * HEAD, HIDDEN),
            f"{i}.v": (kv_heads * HEAD, HIDDEN),
            f"{i}.o": (HIDDEN, heads * HEAD),
            f"{i}.gate": (3 * HIDDEN, HIDDEN),
            f"{i}.up": (3 * HIDDEN, HIDDEN),
            f"{i}.norm": (HIDDEN,),
        }
    return shapes


def column_or_row(name: str) -> Cut | None:
    kind = name.rpartition(".")[2]
    return None if kind in ("norm", "scale") else Cut(1 if kind == "o" else 0)


@st.composite
def trainers(draw: st.DrawFn) -> tuple[dict[str, Shape], list[list[HeldRow]]]:
    """FSDP, HSDP, tensor, data and pipeline parallelism, and FSDP on top of tensor parallelism."""
    shapes = model(draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 2)))
    kind = draw(st.sampled_from(["fsdp", "hsdp", "tp", "dp", "tp+fsdp", "pp"]))
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rows = lambda name: Cut(0) if shapes[name] else None
    if kind == "fsdp":
        return shapes, meshed(shapes, (n,), lambda name: [rows(name)])
    if kind == "hsdp":
        return shapes, meshed(shapes, (m, n), lambda name: [None, rows(name)])
    if kind == "tp":
        return shapes, meshed(shapes, (m, n), lambda name: [None, column_or_row(name)])
    if kind == "dp":
        return shapes, meshed(shapes, (n,), lambda _: [None])
    if kind == "tp+fsdp":

        def both(name: str) -> list[Cut | None]:
            tensor = column_or_row(name)
            stride = 2 if tensor is not None and tensor.dim == 0 else 1
            return [Cut(0, stride) if shapes[name] else None, tensor]

        return shapes, meshed(shapes, (m, 2), both)
    stages = meshed(shapes, (n, m), lambda name: [None, rows(name)])
    return shapes, [[row for i, row in enumerate(held) if i % n == rank // m] for rank, held in enumerate(stages)]


@given(trainers())
def test_each_element_is_published_once_by_who_holds_it(made: tuple[dict[str, Shape], list[list[HeldRow]]]) -> None:
    shapes, ranks = made
    times = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for held, share in zip(ranks, shares(ranks), strict=True):
        boxes = {name: own for name, _, _, own in held}
        for name, box in share:
            assert any(common(box, own) == box for own in boxes[name])
            times[name][tuple(slice(*side) for side in box)] += 1
    assert all((count == 1).all() for count in times.values())


# ---- against torch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 4), (9,)])
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3)])
def test_cuts_are_what_dtensors_placements_mean(shape: Shape, mesh: tuple[int, int]) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    numbers = torch.arange(math.prod(shape)).view(shape)
    choices: list[list[Cut | None]] = [
        [Cut(0), Cut(0)],
        [Cut(0, stride=mesh[1]), Cut(0)],
        [None, Cut(0)],
        [Cut(0), None],
    ]
    if len(shape) > 1:
        choices += [[Cut(0), Cut(1)], [Cut(1), Cut(0)]]
    for cuts, place in itertools.product(choices, itertools.product(*map(range, mesh))):
        local = numbers
        for size, cut, index in zip(mesh, cuts, place, strict=True):
            if cut is not None:
                placement = Shard(cut.dim) if cut.stride == 1 else _StridedShard(cut.dim, split_factor=cut.stride)
                local = placement._split_tensor(local, size, with_padding=False)[0][index]
        found = torch.full(local.shape, -1)
        for piece in pieces_on_mesh(shape, mesh, cuts, place, "w"):
            at = tuple(slice(at, at + stop - start) for at, (start, stop) in zip(piece.at, piece.box, strict=True))
            found[at] = numbers[tuple(slice(*side) for side in piece.box)]
        assert torch.equal(found, local)
