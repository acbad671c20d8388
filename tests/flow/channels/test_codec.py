"""Objects taken apart and put together, in messages and in shared memory."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.flow.channels.codec import decode, encode, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


@dataclass
class Batch:
    tokens: torch.Tensor
    rewards: "np.ndarray[Any, Any]"
    notes: dict[str, Any]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Batch):
        return all(same(getattr(left, name), getattr(right, name)) for name in ("tokens", "rewards", "notes"))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


tensors = st.builds(
    lambda shape, dtype: torch.randint(0, 2, shape).to(dtype),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
)
arrays = st.sampled_from(
    [np.arange(6).reshape(2, 3), np.zeros((0, 2), np.float16), np.array(1.5), np.array(["a", "bc"])]
)
objects = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3), tensors, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Batch, tensors, arrays, st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    ),
    max_leaves=12,
)


@given(objects)
def test_any_nesting_comes_back(value: Any) -> None:
    assert same(value, decode(*encode(value)))
    assert same(value, unpack(pack(value)))


def test_large_tensors_lie_in_a_file_and_are_the_readers_own(tmp_path: Path) -> None:
    value = {"a": torch.arange(100_000), "b": [torch.ones(3, 4).t()], "c": "x"}
    value["again"] = value["a"]
    parcel = pack(value, tmp_path, "one")
    assert (len(parcel.layouts), len(parcel.data)) == (2, 0)
    assert len(parcel.skeleton) < 1000
    first, second = unpack(parcel), unpack(parcel)
    assert first["again"] is first["a"]
    Path(parcel.path).unlink()  # what is mapped stays
    first["a"][0] = 7
    assert same(second, value)
    with pytest.raises(FileNotFoundError):
        unpack(parcel)
    assert pack({"a": torch.ones(2)}, tmp_path, "two").path == ""


def test_a_folder_without_room_is_an_error_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        pack(torch.zeros(1 << 20), tmp_path, "item")
    assert not list(tmp_path.iterdir())
