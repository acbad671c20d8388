from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.parallel import NeedParallel, combine, scatter, split_sizes


def pieces(value: Any, parts: int, pad: bool = False) -> list[Any]:
    return [args[0] for args in scatter((NeedParallel(value, pad=pad),), {}, parts).args]


def test_nine_over_four() -> None:
    assert split_sizes(9, 4) == (3, 2, 2, 2)
    assert pieces(list(range(9)), 4) == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, np.array])
@given(length=st.integers(1, 40), parts=st.integers(1, 9), pad=st.booleans())
def test_split_and_gather_are_inverse(make: Any, length: int, parts: int, pad: bool) -> None:
    value = make(list(range(length)))
    if length < parts and not pad:
        with pytest.raises(ValueError, match=f"{length} item.*over {parts} data-parallel ranks"):
            scatter((NeedParallel(value),), {}, parts)
        return
    scattered = scatter((), {"x": NeedParallel(value, pad=pad)}, parts)
    split = [kwargs["x"] for kwargs in scattered.kwargs]
    lengths = [len(piece) for piece in split]
    assert max(lengths) - min(lengths) <= (0 if pad else 1)
    assert lengths == list(scattered.sizes or ())
    assert all(type(piece) is type(value) for piece in split)
    joined = combine(split, "gather", scattered.sizes, scattered.length)
    assert type(joined) is type(value)
    assert list(joined) == list(range(length))


def test_marks_nest_and_unmarked_arguments_go_to_every_rank() -> None:
    ids = torch.arange(6).view(3, 2)
    batch = {"ids": NeedParallel({"tokens": ids, "more": {"names": ["a", "b", "c"]}}), "lr": 0.1}
    scattered = scatter((batch, [NeedParallel((1, 2, 3)), "x"]), {"n": 5}, 2)
    first, second = scattered.args
    assert first[0]["ids"]["tokens"].tolist() == [[0, 1], [2, 3]]
    assert second[0]["ids"]["more"] == {"names": ["c"]}
    assert first[0]["lr"] == second[0]["lr"] == 0.1
    assert (first[1], second[1]) == ([(1, 2), "x"], [(3,), "x"])
    assert scattered.kwargs == ({"n": 5}, {"n": 5})


def test_padding_repeats_the_last_item_and_is_dropped_from_results() -> None:
    assert pieces([1, 2, 3], 2, pad=True) == [[1, 2], [3, 3]]
    assert [p.tolist() for p in pieces(torch.tensor([1]), 3, pad=True)] == [[1], [1], [1]]
    assert combine([[10, 20], [30, 30]], "gather", (2, 2), 3) == [10, 20, 30]


def test_wrong_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same length, got \[2, 3\]"):
        scatter((NeedParallel([1, 2]), NeedParallel([1, 2, 3])), {}, 2)
    with pytest.raises(ValueError, match="empty batch"):
        scatter((NeedParallel([]),), {}, 2)
    with pytest.raises(ValueError, match="every NeedParallel"):
        scatter((NeedParallel([1, 2], pad=True), NeedParallel([1, 2])), {}, 2)
    with pytest.raises(TypeError, match="not int"):
        scatter((NeedParallel(3),), {}, 2)
    with pytest.raises(TypeError, match="without dimensions"):
        scatter((NeedParallel(torch.tensor(3)),), {}, 2)


def test_reductions() -> None:
    results = [{"loss": 1.0, "parts": [2.0, 4.0]}, {"loss": 4.0, "parts": [5.0, 7.0]}]
    assert combine(results, "first", (2, 1), 3) == results[0]
    assert combine(results, "all", (2, 1), 3) == results
    assert combine(results, "sum", (2, 1), 3) == {"loss": 5.0, "parts": [7.0, 11.0]}
    assert combine(results, "mean", (2, 1), 3) == {"loss": 2.0, "parts": [3.0, 5.0]}  # weighted by items
    assert combine(results, "mean", None, 0) == {"loss": 2.5, "parts": [3.5, 5.5]}


def test_gather_of_things_that_are_not_sequences() -> None:
    assert combine([1.5, 2.5], "gather", (1, 1), 2) == [1.5, 2.5]
    assert combine([None, None], "gather", (1, 1), 2) is None
    assert combine([{"a": [1], "n": 1}, {"a": [2], "n": 1}], "gather", (1, 1), 2) == {"a": [1, 2], "n": [1, 1]}
    scalars = combine([torch.tensor(1.0), torch.tensor(2.0)], "gather", (1, 1), 2)
    assert [s.item() for s in scalars] == [1.0, 2.0]
