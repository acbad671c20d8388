"""The plan of a weight transfer, for random layouts on both sides, carried out with numpy arrays."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.weights.layout import (
    Box,
    Cut,
    Layout,
    Part,
    Piece,
    common,
    divided,
    elements,
    moved,
    shard,
    whole,
    without,
)
from rlix.engine.weights.plan import Transfer, least_bytes, plan
from rlix.engine.weights.schedule import schedule
from rlix.protocol.errors import WeightSyncError

Shape = tuple[int, ...]
NODES = st.sampled_from(["a", "b"])


def everything(tensors: dict[str, Shape], dtype: str = "float32", node: str = "") -> Layout:
    return Layout(
        {name: Part(dtype, shape, (Piece(whole(shape), name, (0,) * len(shape)),)) for name, shape in tensors.items()},
        node,
    )


def meshed(
    tensors: dict[str, Shape],
    mesh: Sequence[int],
    cuts: Callable[[str], Sequence[Cut | None]],
    dtype: str = "float32",
    nodes: Sequence[str] = ("",),
) -> list[Layout]:
    """A layout for each rank of a mesh, whose dimensions cut each tensor as `cuts` says."""
    layouts = []
    for rank, place in enumerate(itertools.product(*map(range, mesh))):
        parts = {
            name: Part(dtype, shape, shard(shape, mesh, cuts(name), place, name)) for name, shape in tensors.items()
        }
        layouts.append(Layout(parts, nodes[rank % len(nodes)]))
    return layouts


def test_fsdp_cuts_rows_and_the_last_shard_may_be_short_or_absent() -> None:
    layouts = meshed({"w": (5, 2), "b": (2,)}, (4,), lambda _: [Cut(0)])
    assert [[piece.box for piece in layout.parts["w"].pieces] for layout in layouts] == [
        [((0, 2), (0, 2))],
        [((2, 4), (0, 2))],
        [((4, 5), (0, 2))],
        [],
    ]
    assert [[piece.box for piece in layout.parts["b"].pieces] for layout in layouts] == [
        [((0, 1),)],
        [((1, 2),)],
        [],
        [],
    ]


def test_fsdp_on_top_of_tensor_parallelism_cuts_each_rank_part_again() -> None:
    pieces = [shard((8,), (2, 2), [Cut(0, stride=2), Cut(0)], place, "w") for place in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert [[piece.box for piece in row] for row in pieces] == [[((0, 2),)], [((4, 6),)], [((2, 4),)], [((6, 8),)]]


def test_a_transfer_is_what_both_have_of_a_tensor() -> None:
    sources = meshed({"w": (6, 4)}, (2,), lambda _: [Cut(0)])
    targets = meshed({"w": (6, 4)}, (2,), lambda _: [Cut(1)], dtype="bfloat16")
    made = plan(sources, targets)
    assert [(t.source, t.box, t.target, t.dtype, t.nbytes) for t in made.transfers] == [
        (0, ((0, 3), (0, 2)), 0, "bfloat16", 12),
        (1, ((3, 6), (0, 2)), 0, "bfloat16", 12),
        (0, ((0, 3), (2, 4)), 1, "bfloat16", 12),
        (1, ((3, 6), (2, 4)), 1, "bfloat16", 12),
    ]
    assert made.nbytes == least_bytes(sources, targets) == 6 * 4 * 2


def test_what_a_worker_reads_of_a_bucket_lies_together() -> None:
    sources = meshed({f"w{i}": (4, 4) for i in range(6)}, (2,), lambda _: [Cut(0)])
    targets = meshed({f"w{i}": (4, 4) for i in range(6)}, (2,), lambda _: [Cut(1)])  # alternating in every tensor
    made = plan(sources, targets).transfers
    loads = schedule(made, {f"w{i}": (4, 4) for i in range(6)}, lambda *_: "shm", 2**20, 2)
    assert [(load.source, load.targets, load.start, len(load.runs)) for load in loads] == [
        (0, (2,), 0, 1),
        (0, (3,), 6 * 16, 1),
        (1, (2,), 0, 1),
        (1, (3,), 6 * 16, 1),
    ]


def test_replicas_share_the_work_and_those_on_the_node_come_first() -> None:
    tensors = {f"t{i}": (4, 2) for i in range(6)}
    sources = [everything(tensors, node=node) for node in ("a", "a", "b")]
    far = plan(sources, [everything(tensors, node="c")])
    assert {rank: sum(t.source == rank for t in far.transfers) for rank in range(3)} == {0: 2, 1: 2, 2: 2}
    near = plan(sources, [everything(tensors, node="a"), everything(tensors, node="a")])
    assert {t.source for t in near.transfers} == {0, 1}
    assert all(len({t.source for t in near.transfers if t.name == name}) == 1 for name in tensors)  # written once


def test_what_nobody_holds_is_listed() -> None:
    sources = [everything({"a": (2, 2), "b": (3,)}), everything({"c": (2,)}, dtype="int64")]
    sources[0] = replace(
        sources[0], parts={**sources[0].parts, "d": Part("float32", (4,), (Piece(((0, 3),), "d", (0,)),))}
    )
    targets = [everything({"a": (2, 3), "b": (3,), "c": (2,), "d": (4,), "e": (1,)})]
    with pytest.raises(WeightSyncError) as caught:
        plan(sources, targets)
    for problem in (
        "shape of a: held [2, 2], needed [2, 3]",
        "dtype of c: held int64, needed float32",
        "held by nobody: d[3:4]",
        "held by nobody: e",
    ):
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


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.integers(1, 30))
def test_a_divided_box_is_the_same_elements_in_the_same_order(shape: Shape, most: int) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    parts = [numbers[tuple(slice(*side) for side in box)] for box in divided(whole(shape), most)]
    assert all(part.size <= most for part in parts)
    assert np.concatenate([part.reshape(-1) for part in parts]).tolist() == list(range(numbers.size))


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


def fused(shapes: dict[str, Shape], tp: int, rank: int, dtype: str, node: str) -> Layout:
    """As vLLM lays a model out: q, k, v and gate, up fused, heads of k and v repeated where `tp` is larger."""
    parts: dict[str, Part] = {}

    def rows(name: str) -> Box:
        shape = shapes[name]
        own = shard(shape, (tp,), [Cut(0)], (rank,), name)
        if name[-1] in "kv" and shape[0] < tp * HEAD:
            head = rank * (shape[0] // HEAD) // tp
            return ((head * HEAD, (head + 1) * HEAD), (0, shape[1]))
        return own[0].box if own else ((0, 0), *whole(shape)[1:])

    def put(name: str, *pieces: Piece) -> None:
        parts[name] = Part(dtype, shapes[name], tuple(piece for piece in pieces if elements(piece.box)))

    for name, shape in shapes.items():
        kind = name.rpartition(".")[2]
        if kind in ("q", "gate"):
            names = [name] + [name[: -len(kind)] + other for other in (("k", "v") if kind == "q" else ("up",))]
            for each, piece in stacked(f"{name}+", [(each, rows(each)) for each in names]).items():
                put(each, piece)
        elif kind == "o":
            put(name, *shard(shape, (tp,), [Cut(1)], (rank,), name))
        elif kind == "embed":
            put(name, *shard(shape, (tp,), [Cut(0)], (rank,), name))
        elif kind in ("norm", "scale"):
            put(name, Piece(whole(shape), name, (0,) * len(shape)))
    return Layout(parts, node)


def column_or_row(name: str) -> Cut | None:
    kind = name.rpartition(".")[2]
    return None if kind in ("norm", "scale") else Cut(1 if kind == "o" else 0)


@st.composite
def trainers(draw: st.DrawFn, shapes: dict[str, Shape]) -> list[Layout]:
    """FSDP, HSDP, tensor, data and pipeline parallelism, and FSDP on top of tensor parallelism."""
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    nodes = draw(st.lists(NODES, min_size=1, max_size=4))
    kind = draw(st.sampled_from(["fsdp", "hsdp", "tp", "dp", "tp+fsdp", "pp", "fused"]))
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    if kind == "fsdp":
        return meshed(shapes, (n,), lambda name: [Cut(0) if shapes[name] else None], dtype, nodes)
    if kind == "hsdp":
        return meshed(shapes, (m, n), lambda name: [None, Cut(0) if shapes[name] else None], dtype, nodes)
    if kind == "tp":
        return meshed(shapes, (m, n), lambda name: [None, column_or_row(name)], dtype, nodes)
    if kind == "dp":
        return meshed(shapes, (n,), lambda _: [None], dtype, nodes)
    if kind == "tp+fsdp":

        def both(name: str) -> list[Cut | None]:
            tensor = column_or_row(name)
            stride = 2 if tensor is not None and tensor.dim == 0 else 1
            return [Cut(0, stride) if shapes[name] else None, tensor]

        return meshed(shapes, (m, 2), both, dtype, nodes)
    if kind == "fused":
        return [fused(shapes, n, rank, dtype, nodes[rank % len(nodes)]) for rank in range(n)]
    stages = meshed(shapes, (n, m), lambda name: [None, Cut(0) if shapes[name] else None], dtype, nodes)
    for rank, layout in enumerate(stages):
        mine = {name: part for i, (name, part) in enumerate(layout.parts.items()) if i % n == rank // m}
        stages[rank] = replace(layout, parts=mine)
    return stages


@st.composite
def replicas(draw: st.DrawFn, shapes: dict[str, Shape]) -> list[Layout]:
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    tp = draw(st.integers(1, 4))
    nodes = draw(st.lists(NODES, min_size=1, max_size=2))
    return [fused(shapes, tp, rank, dtype, node) for node in nodes for rank in range(tp)]


@st.composite
def engines(draw: st.DrawFn) -> tuple[dict[str, Shape], list[Layout], list[Layout]]:
    shapes = model(draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 2)))
    train, infer = draw(trainers(shapes)), draw(replicas(shapes))
    return (shapes, train, infer) if draw(st.booleans()) else (shapes, infer, train)


def memory(layout: Layout, values: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """A process's own tensors: with the right values where it holds them, else with -1."""
    pieces = [(name, piece) for name, part in layout.parts.items() for piece in part.pieces]
    sizes: dict[str, list[int]] = {}
    for _, piece in pieces:
        ends = [at + stop - start for at, (start, stop) in zip(piece.at, piece.box, strict=True)]
        known = sizes.setdefault(piece.local, ends)
        sizes[piece.local] = [max(pair) for pair in zip(known, ends, strict=True)]
    tensors = {local: np.full(size, -1.0) for local, size in sizes.items()}
    for name, piece in pieces if values else ():
        tensors[piece.local][_own(piece.at, piece.box)] = values[name][tuple(slice(*side) for side in piece.box)]  # type: ignore[index]
    return tensors


def _own(at: tuple[int, ...], box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + stop - start) for first, (start, stop) in zip(at, box, strict=True))


def _place(layout: Layout, transfer: Transfer) -> tuple[tuple[slice, ...], str]:
    """The one piece that what moves lies in, and where."""
    pieces = layout.parts[transfer.name].pieces
    (piece,) = [piece for piece in pieces if common(piece.box, transfer.box) == transfer.box]
    return _own(moved(transfer.box, piece), transfer.box), piece.local


@given(engines())
def test_every_element_arrives_once_from_the_right_place(
    made: tuple[dict[str, Shape], list[Layout], list[Layout]],
) -> None:
    shapes, sources, targets = made
    numbers = itertools.count()
    values = {
        name: np.array([next(numbers) for _ in range(math.prod(shape))], dtype=float).reshape(shape)
        for name, shape in shapes.items()
    }
    here, there = [memory(layout, values) for layout in sources], [memory(layout, None) for layout in targets]
    expected = [memory(layout, values) for layout in targets]
    writes = [{local: np.zeros(tensor.shape, int) for local, tensor in tensors.items()} for tensors in there]
    made_plan = plan(sources, targets)
    for t in made_plan.transfers:
        (taken, source), (put, target) = _place(sources[t.source], t), _place(targets[t.target], t)
        there[t.target][target][put] = here[t.source][source][taken]
        writes[t.target][target][put] += 1
    for found, right, counts in zip(there, expected, writes, strict=True):
        for local, tensor in found.items():
            assert np.array_equal(tensor, right[local])
            assert (counts[local] == (right[local] >= 0)).all()
    assert made_plan.nbytes == least_bytes(sources, targets)
    for t in made_plan.transfers:
        near = [source for source in sources if source.node == targets[t.target].node and _holds(source, t)]
        assert not near or sources[t.source] in near


def stacked(local: str, parts: Iterable[tuple[str, Box]]) -> dict[str, Piece]:
    """A fused parameter: boxes of several tensors, by name, one after the other along dimension 0 of a local tensor."""
    pieces: dict[str, Piece] = {}
    row = 0
    for name, box in parts:
        pieces[name] = Piece(box, local, (row, *(0 for _ in box[1:])))
        row += box[0][1] - box[0][0]
    return pieces


def _holds(layout: Layout, t: Transfer) -> bool:
    """Whether these bytes could have come from there instead: it holds the same piece."""
    return t.name in layout.parts and any(
        all(a <= c and d <= b for (a, b), (c, d) in zip(piece.box, t.box, strict=True))
        for piece in layout.parts[t.name].pieces
    )


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
        for piece in shard(shape, mesh, cuts, place, "w"):
            found[_own(piece.at, piece.box)] = numbers[tuple(slice(*side) for side in piece.box)]
        assert torch.equal(found, local)
