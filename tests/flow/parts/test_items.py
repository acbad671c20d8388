"""Items in the object store: each is read by itself, and is what it was."""

import pickle
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from rlix.flow.parts.items import LARGE, Items, Packed


def sent(items: list[Any]) -> tuple[Packed, int]:
    """As the object store does it, large buffers beside the pickle; and the bytes of the pickle."""
    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(Items(items), protocol=5, buffer_callback=buffers.append)
    there = [memoryview(bytes(buffer.raw())).toreadonly() for buffer in buffers]
    return pickle.loads(data, buffers=there), len(data)


@given(st.lists(st.one_of(st.integers(), st.text(), st.lists(st.floats(allow_nan=False)), st.none())), st.data())
def test_any_of_them_are_what_they_were(items: list[Any], data: st.DataObject) -> None:
    packed, _ = sent(items)
    begin, end = (data.draw(st.integers(0, len(items) + 2)) for _ in range(2))
    assert len(packed) == len(items)
    assert packed.cut(begin, end) == Items(items).cut(begin, end) == items[begin:end]


class Counts:
    """Counts how often one is read."""

    read: ClassVar[dict[int, int]] = {}

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)
        self.read[self.number] = self.read.get(self.number, 0) + 1


def test_who_takes_one_reads_one() -> None:
    Counts.read.clear()
    packed, _ = sent([Counts(n) for n in range(8)])
    assert Counts.read == {}
    assert [item.number for n in range(8) for item in packed.cut(n, n + 1)] == list(range(8))
    assert Counts.read == dict.fromkeys(range(8), 1)


def test_large_arrays_and_tensors_are_beside_the_pickle_and_tensors_can_be_written() -> None:
    count = LARGE // 4
    mixed: list[Any] = [
        np.arange(count, dtype=np.float32),
        torch.arange(count, dtype=torch.float32),
        {"few": torch.tensor([1, 2]), "half": torch.ones(count, dtype=torch.bfloat16)},
        torch.ones(3, 2).t(),
        torch.zeros(2, 0),
        torch.tensor(7),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.complex64).conj(),
    ]
    packed, size = sent(mixed)
    assert size < LARGE
    array, tensor, some, *rest = packed.cut(0, len(mixed))
    assert np.array_equal(array, mixed[0]) and torch.equal(tensor, mixed[1])
    assert torch.equal(some["half"], mixed[2]["half"]) and torch.equal(some["few"], mixed[2]["few"])
    for value, was in zip(rest, mixed[3:], strict=True):
        assert type(value) is type(was) and value.dtype is was.dtype
        assert torch.equal(value, was) and value.requires_grad == was.requires_grad
    tensor.add_(1)
    assert torch.equal(tensor, mixed[1] + 1)
    assert torch.equal(packed.cut(1, 2)[0], mixed[1])  # whoever takes it next has it as it was


def test_a_class_of_a_script_is_sent_once() -> None:
    @dataclass
    class Own:
        number: int

    one, many = sent([Own(0)])[1], sent([Own(n) for n in range(100)])[1]
    assert many < one + 100
    packed, _ = sent([Own(1), Own(2)])
    first, second = packed.cut(0, 2)
    assert (type(first), first.number, second.number) == (type(second), 1, 2)


def test_a_function_of_an_item_is_of_the_one_that_arrives() -> None:
    class Steps:
        def __init__(self) -> None:
            self.taken = 0
            self.step = lambda: setattr(self, "taken", self.taken + 1)

    packed, _ = sent([Steps(), Steps()])
    first, second = packed.cut(0, 2)
    first.step()
    assert (first.taken, second.taken) == (1, 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_several_lengths_are_what_they_were() -> None:
    packed, _ = sent([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])])
    assert [part.tolist() for part in packed.cut(0, 1)[0].unbind()] == [[1, 1], [1, 1, 1]]


def test_an_item_may_read_others_while_it_is_read() -> None:
    @dataclass
    class Own:
        number: int

    inner, _ = sent([Own(1)])

    class Reads:
        def __reduce__(self) -> Any:
            return lambda: inner.cut(0, 1), ()

    packed, _ = sent([[Reads(), Own(2)]])
    ((found,), own) = packed.cut(0, 1)[0]
    assert (found.number, own.number) == (1, 2)


@pytest.mark.ray
def test_an_item_may_be_in_the_object_store_itself(ray_session: Any) -> None:
    packed = ray.get(ray.put(Items([ray.put("here"), {"in": ray.put([1])}])))
    (first,), (second,) = packed.cut(0, 1), packed.cut(1, 2)
    assert (ray.get(first), ray.get(second["in"])) == ("here", [1])
