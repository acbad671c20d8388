"""By which way messages go, and how batches are cut and joined: pure."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.flow.channels.codec import pack, unpack
from rlix.flow.messages.batches import cut, join, rows, spans
from rlix.flow.messages.routes import Carrier, Place, Route, route
from rlix.protocol.messages import DeviceKind

CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA


@pytest.mark.parametrize(
    ("reader", "expected", "on_gpu"),
    [
        (Place("a", CPU), Route(Carrier.SHARED_MEMORY, onto=False), Carrier.SHARED_MEMORY),
        (Place("a", CUDA, ("2",)), Route(Carrier.SHARED_MEMORY, onto=True), Carrier.SHARED_MEMORY),
        (Place("a", CUDA, ("2", "1")), Route(Carrier.SHARED_MEMORY, onto=True, ipc=("1",)), Carrier.CUDA_IPC),
        (Place("b", CPU), Route(Carrier.OBJECT_STORE, onto=False), Carrier.OBJECT_STORE),
        (Place("b", CUDA, ("1",)), Route(Carrier.OBJECT_STORE, onto=True), Carrier.OBJECT_STORE),
    ],
)
def test_the_way_of_a_message(reader: Place, expected: Route, on_gpu: Carrier) -> None:
    """From a worker that sees GPUs 0 and 1, of a tensor on its second one."""
    sender = Place("a", CUDA, ("0", "1"))
    assert route(sender, reader, cuda_ipc=True) == expected
    assert expected.of("1") is on_gpu
    assert expected.of("0") is expected.of("") is expected.carrier
    assert route(sender, reader) == replace(expected, ipc=())


def test_only_what_came_from_a_device_goes_onto_the_readers() -> None:
    on_device, on_host = torch.empty(3, device="meta"), torch.ones(3)
    assert [layout.onto for layout in pack([on_host], onto=True).layouts] == [False]
    with pytest.raises(NotImplementedError):  # this device cannot be read, but it was tried
        pack([on_device], onto=True)
    parcel = pack([on_host, on_host + 1])
    (moved, stayed) = parcel.layouts
    parcel = replace(parcel, layouts=(replace(moved, onto=True), stayed))
    assert [tensor.device.type for tensor in unpack(parcel, "meta")] == ["meta", "cpu"]


def made(kind: str, start: int, count: int) -> Any:
    numbers = list(range(start, start + count))
    if kind == "list":
        return numbers
    tokens = torch.tensor(numbers, dtype=torch.int64).reshape(count, 1)
    return {"tokens": tokens, "more": {"rewards": np.array(numbers, np.float32), "texts": [str(n) for n in numbers]}}


@given(st.sampled_from(["list", "dict"]), st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(1, 6))
def test_rows_go_from_some_ranks_to_others_in_order_and_evenly(kind: str, counts: list[int], targets: int) -> None:
    sent = [made(kind, sum(counts[:rank]), count) for rank, count in enumerate(counts)]
    shares = [spans(counts, rank, targets) for rank in range(len(counts))]
    got = [join([cut(sent[r], *shares[r][n]) for r in range(len(counts))]) for n in range(targets)]
    sizes = [rows(batch) for batch in got]
    assert max(sizes) - min(sizes) <= 1
    whole = join(got)
    expected = made(kind, 0, sum(counts))
    if kind == "list":
        assert whole == expected
    else:
        assert whole["tokens"].equal(expected["tokens"])
        assert whole["more"]["rewards"].tolist() == expected["more"]["rewards"].tolist()
        assert whole["more"]["texts"] == expected["more"]["texts"]


@pytest.mark.parametrize("batch", [{"a": [1], "b": [1, 2]}, 3, torch.tensor(1.0)])
def test_what_has_no_rows_is_no_batch(batch: Any) -> None:
    with pytest.raises(ValueError, match="batch"):
        rows(batch)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([[1], torch.ones(1)], "of one kind, not list, Tensor"),
        ([torch.ones(1), np.ones(1)], "of one kind, not Tensor, ndarray"),
        ([{"a": [1]}, {"a": [1], "b": [1]}], "the same members, not a; a, b"),
        ([{"a": [1]}, {"a": np.ones(1)}], "of one kind, not list, ndarray"),
    ],
)
def test_shares_that_are_not_alike_are_not_joined(shares: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join(shares)
