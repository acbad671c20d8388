"""Boxes of tensors that pass from one layout to another, and how layouts are asked for."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.train.handover import Box, Handover, Piece, pack, unpack
from rlix.engine.train.layout import Layout, asked_layout
from rlix.protocol.errors import WeightSyncError


def cuts(length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ways to cut a dimension: (first, length) of each part, some of them empty."""
    places = st.lists(st.integers(0, length), max_size=4).map(lambda found: sorted([0, *found, length]))
    return places.map(lambda ends: [(first, end - first) for first, end in pairwise(ends)])


@given(st.data(), st.integers(1, 7), st.integers(1, 7))
def test_boxes_that_cover_a_tensor_fill_every_box_of_any_other_cut(
    data: st.DataObject, rows: int, columns: int
) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)

    def boxes() -> list[Box]:
        dims = [data.draw(cuts(rows)), data.draw(cuts(columns))]
        return [Box((a, b), (n, m)) for a, n in dims[0] for b, m in dims[1]]

    sources = boxes()
    everything = Box((0, 0), (rows, columns))
    for box in boxes():
        target, copied = torch.full(box.size, -1.0), 0
        for source in sources:
            if common := box.intersection(source):
                values = everything.of(whole, source).clone()
                box.of(target, common).copy_(source.of(values, common))
                copied += common.volume
        assert copied == box.volume
        assert torch.equal(target, everything.of(whole, box))


def handed(**tensors: torch.Tensor) -> Handover:
    return Handover(*pack(tensors, 0), "{}", "{}")


def test_what_is_packed_is_unpacked_to_the_bit_and_copies_count_once() -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "step": torch.tensor(3.0), "n": torch.arange(3)}
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    unpack(targets, [handed(**tensors), handed(**tensors)])
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
    assert pack(tensors, 1)[0] == ()  # rank 0 hands over what all have


def test_what_nobody_handed_over_is_named() -> None:
    half = Handover((Piece("a", "float32", Box((0, 0), (1, 2)), 0),), handed(a=torch.ones(1, 2)).data, "{}", "{}")
    with pytest.raises(WeightSyncError, match=r"does not cover a: 2 element\(s\); b: 1 element\(s\)"):
        unpack({"a": torch.zeros(2, 2), "b": torch.zeros(1)}, [half])


def test_sizes_and_devices_agree() -> None:
    assert asked_layout(1, None, None, None) == Layout()
    assert asked_layout(1, None, 4, None) == Layout(data=4, shard=4)
    assert asked_layout(1, 8, 4, None) == Layout(data=8, shard=4)
    assert asked_layout(2, None, None, 6) == Layout(data=3, tensor=2)
    assert asked_layout(1, None, 2, 4) == Layout(data=4, shard=2)
    for sizes, message in (
        ((2, None, None, 3), "3 device"),
        ((1, 3, 2, None), "shard=2 does not divide data_parallel_size=3"),
        ((0, None, None, None), "at least 1"),
        ((1, 2, None, 4), r"4 device\(s\) do not fit tensor_parallel_size=1 x data_parallel_size=2"),
    ):
        with pytest.raises(ValueError, match=message):
            asked_layout(*sizes)


def test_ranks_of_a_layout() -> None:
    layout = Layout(data=3, tensor=2)
    assert [layout.data_part(rank) for rank in range(layout.world)] == [0, 0, 1, 1, 2, 2]
    assert layout.data_ranks() == [[0, 2, 4], [1, 3, 5]]
    assert layout.tensor_ranks() == [[0, 1], [2, 3], [4, 5]]
