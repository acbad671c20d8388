from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.parallel import NeedParallel, balanced, combine, neighbours, scatter


def pieces(value: Any, parts: int, pad: bool = False) -> list[Any]:
    return [args[0] for args in scatter((NeedParallel(value, pad=pad),), {}, parts).args]


def test_nine_over_four() -> None:
    assert [len(items) for items in neighbours(9, 4)] == [3, 2, 2, 2]
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
    assert lengths == [len(rows) for rows in scattered.items or ()]
    assert all(type(piece) is type(value) for piece in split)
    joined = combine(split, "gather", scattered.items)
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
    assert combine([[10, 20], [30, 30]], "gather", ((0, 1), (2, 2))) == [10, 20, 30]


def test_costs_are_balanced_and_results_come_back_in_order() -> None:
    assert balanced([9, 8, 2, 1, 1, 1], 2) == ((0, 3, 4), (1, 2, 5))  # 11 each, where in order it were 19 and 3
    assert balanced([1, 1, 1, 1, 1], 2) == ((0, 1, 2), (3, 4))
    mark = NeedParallel([9, 8, 2, 1, 1], costs=[9, 8, 2, 1, 1], pad=True)
    scattered = scatter((mark, NeedParallel(torch.arange(5), pad=True)), {}, 2)
    assert scattered.items == ((0, 3, 4), (1, 2, 4))
    assert [(list(a), b.tolist()) for a, b in scattered.args] == [([9, 1, 1], [0, 3, 4]), ([8, 2, 1], [1, 2, 4])]
    assert combine([a for a, _ in scattered.args], "gather", scattered.items) == [9, 8, 2, 1, 1]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_a_balanced_split_has_the_usual_sizes_and_is_never_worse_than_neighbours(costs: list[int], parts: int) -> None:
    if len(costs) < parts:
        return
    shares = balanced(costs, parts)
    assert [len(items) for items in shares] == [len(items) for items in neighbours(len(costs), parts)]
    assert sorted(item for items in shares for item in items) == list(range(len(costs)))
    in_order = [args[0] for args in scatter((NeedParallel(costs),), {}, parts).args]
    assert max(sum(costs[item] for item in items) for items in shares) <= max(map(sum, in_order))
    split = scatter((NeedParallel(torch.tensor(costs), costs=costs),), {}, parts)
    assert combine([args[0] for args in split.args], "gather", split.items).tolist() == costs


def test_wrong_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same length, got \[2, 3\]"):
        scatter((NeedParallel([1, 2]), NeedParallel([1, 2, 3])), {}, 2)
    with pytest.raises(ValueError, match="empty batch"):
        scatter((NeedParallel([]),), {}, 2)
    with pytest.raises(ValueError, match="every NeedParallel"):
        scatter((NeedParallel([1, 2], pad=True), NeedParallel([1, 2])), {}, 2)
    with pytest.raises(ValueError, match="one cost for each of 3 items, the same in a call; got \\[2\\]"):
        scatter((NeedParallel([1, 2, 3], costs=[1, 2]),), {}, 2)
    with pytest.raises(TypeError, match="not int"):
        scatter((NeedParallel(3),), {}, 2)
    with pytest.raises(TypeError, match="without dimensions"):
        scatter((NeedParallel(torch.tensor(3)),), {}, 2)


def test_reductions() -> None:
    results = [{"loss": 1.0, "parts": [2.0, 4.0]}, {"loss": 4.0, "parts": [5.0, 7.0]}]
    assert combine(results, "first", ((0, 1), (2,))) == results[0]
    assert combine(results, "all", ((0, 1), (2,))) == results
    assert combine(results, "sum", ((0, 1), (2,))) == {"loss": 5.0, "parts": [7.0, 11.0]}
    assert combine(results, "mean", ((0, 1), (2,))) == {"loss": 2.0, "parts": [3.0, 5.0]}  # weighted by items
    assert combine(results, "mean", None) == {"loss": 2.5, "parts": [3.5, 5.5]}


def test_gather_of_things_that_are_not_sequences() -> None:
    assert combine([1.5, 2.5], "gather", ((0,), (1,))) == [1.5, 2.5]
    assert combine([None, None], "gather", ((0,), (1,))) is None
    assert combine([{"a": [1], "n": 1}, {"a": [2], "n": 1}], "gather", ((0,), (1,))) == {"a": [1, 2], "n": [1, 1]}
    scalars = combine([torch.tensor(1.0), torch.tensor(2.0)], "gather", ((0,), (1,)))
    assert [s.item() for s in scalars] == [1.0, 2.0]
