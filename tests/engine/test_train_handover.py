"""Boxes of tensors that pass from one layout to another, and how layouts are asked for."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.train.handover import Handover, pack, unpack
from rlix.engine.train.layout import Layout, as_wide, asked_layout
from rlix.engine.weights import buckets
from rlix.engine.weights.boxes import Box
from rlix.engine.weights.buckets import WeightSlice
from rlix.protocol.errors import WeightSyncError


def cuts(length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ways to cut a dimension: (first, length) of each part, some of them empty."""
    places = st.lists(st.integers(0, length), max_size=4).map(lambda found: sorted([0, *found, length]))
    return places.map(lambda ends: [(first, end - first) for first, end in pairwise(ends)])


@given(st.data(), st.integers(1, 7), st.integers(1, 7))
def test_however_a_tensor_is_cut_its_parts_make_it_whole(data: st.DataObject, rows: int, columns: int) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    dims = [data.draw(cuts(rows)), data.draw(cuts(columns))]
    parts = [cut(whole, ((a, a + n), (b, b + m))) for a, n in dims[0] for b, m in dims[1] if n and m]
    target = {"a": torch.full_like(whole, -1.0)}
    unpack(target, data.draw(st.permutations(parts)))
    assert torch.equal(target["a"], whole)
    lost = parts.pop()
    with pytest.raises(WeightSyncError, match=rf"does not cover a: {lost.manifest.nbytes // 4} element"):
        unpack(target, parts)


def cut(whole: torch.Tensor, box: Box) -> Handover:
    """What a rank hands over that holds this box alone."""
    values = whole[tuple(slice(*dim) for dim in box)].contiguous()
    return Handover(*buckets.pack([(WeightSlice("a", tuple(whole.shape), box), values)]), "{}", "{}")


def handed(**tensors: torch.Tensor) -> Handover:
    return Handover(*pack(tensors, 0), "{}", "{}")


def test_what_is_packed_is_unpacked_to_the_bit_and_copies_count_once() -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "step": torch.tensor(3.0), "n": torch.arange(3)}
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    unpack(targets, [handed(**tensors), handed(**tensors)])
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
    assert not pack(tensors, 1)[0]  # rank 0 hands over what all have


def test_what_nobody_handed_over_is_named() -> None:
    half = cut(torch.ones(2, 2), ((0, 1), (0, 2)))
    with pytest.raises(WeightSyncError, match=r"does not cover a: 2 element\(s\); b: 1 element\(s\)"):
        unpack({"a": torch.zeros(2, 2), "b": torch.zeros(1)}, [half])


def test_sizes_and_devices_agree() -> None:
    assert asked_layout(1, None, None, None) == Layout()
    assert asked_layout(1, None, 4, None) == Layout(data=4, shard=4)
    assert asked_layout(1, 8, 4, None) == Layout(data=8, shard=4)
    assert asked_layout(2, None, None, 6) == Layout(data=3, tensor=2)
    assert asked_layout(1, None, 2, 4) == Layout(data=4, shard=2)
    assert asked_layout(1, None, 4, None, 2) == Layout(data=2, shard=4, sequence=2)
    assert as_wide(Layout(data=2, shard=4, sequence=2), 2) == Layout(data=1, shard=2, sequence=2)
    for sizes, message in (
        ((2, None, None, 3), "3 device"),
        ((1, 3, 2, None), "shard=2 does not divide data_parallel_size=3"),
        ((1, 1, 4, None, 2), "shard=4 does not divide data_parallel_size=1 x sequence_parallel_size=2"),
        ((1, None, None, 3, 2), "3 device.* sequence_parallel_size=2 x data_parallel_size=any"),
        ((0, None, None, None), "at least 1"),
        ((1, 0, None, None), "at least 1"),
        ((1, None, 0, None), "at least 1"),
        ((1, 2, None, 4), r"4 device\(s\) do not fit tensor_parallel_size=1 x data_parallel_size=2"),
    ):
        with pytest.raises(ValueError, match=message):
            asked_layout(*sizes)


def test_ranks_of_a_layout() -> None:
    layout = Layout(data=2, tensor=2, sequence=2)
    assert [layout.data_part(rank) for rank in range(layout.world)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layout.data_ranks() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.tensor_ranks() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.sequence_ranks() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    layout = Layout(data=3, tensor=2)
    assert [layout.data_part(rank) for rank in range(layout.world)] == [0, 0, 1, 1, 2, 2]
    assert layout.data_ranks() == [[0, 2, 4], [1, 3, 5]]
    assert layout.tensor_ranks() == [[0, 1], [2, 3], [4, 5]]
