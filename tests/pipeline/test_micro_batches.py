"""How rows are put together, and where they lie: pure functions."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rlix.pipeline.training.metrics import mean_metrics
from rlix.pipeline.training.micro_batches import in_place, micro_batches, model_inputs, plan, row_lengths

LENGTHS = st.lists(st.integers(2, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 200), st.booleans())
def test_every_row_is_in_one_group_within_the_budget(lengths: list[int], budget: int, packed: bool) -> None:
    groups = plan(lengths, budget, packed=packed)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[row] for row in group]
        used = sum(sizes) if packed else max(sizes) * len(sizes)
        assert used <= budget or len(group) == 1


def test_rows_of_like_length_go_together() -> None:
    assert plan([3, 9, 4, 10], 20) == [(1, 3), (0, 2)]
    assert plan([3, 9, 4, 10], 24, packed=True) == [(1, 2, 3), (0,)]
    assert plan([30], 4) == [(0,)]


def test_a_row_ends_with_its_last_counted_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    assert row_lengths(mask) == [4, 2, 5]


def test_parts_are_cut_to_their_longest_row_and_filled_up_with_parts_that_count_for_nothing() -> None:
    batch = {
        "input_ids": torch.arange(15).view(3, 5),
        "mask": torch.tensor([[0.0, 1, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]),
        "advantages": torch.tensor([0.5, 1.5, 2.5]),
    }
    first, second, empty = micro_batches(batch, [(1,), (0, 2)], 3)
    assert (first.rows, second.rows, empty.rows) == ((1,), (0, 2), ())
    assert second.tensors["input_ids"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert second.tensors["mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert second.tensors["advantages"].tolist() == [0.5, 2.5]
    assert empty.tensors["input_ids"].shape == (1, 2) and not empty.tensors["mask"].any()


def test_packed_rows_lie_one_after_the_other_without_padding() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]),
        "mask": torch.tensor([[0.0, 1, 1], [1, 0, 0]]),
    }
    packed, padded = model_inputs(batch, packed=True), model_inputs(batch)
    assert packed.tensors["input_ids"].tolist() == [[5, 6, 7, 9]]
    assert packed.tensors["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert packed.predictions.tolist() == [1, 2, 3]
    assert padded.tensors["input_ids"].tolist() == [[5, 6, 7], [9, 10, 0]]
    assert padded.predictions.tolist() == [1, 2, 3]


def test_values_return_to_their_places() -> None:
    mask = torch.tensor([[0.0, 1, 1], [1, 0, 0]])
    assert_close(in_place(torch.tensor([1.0, 2.0, 3.0]), mask), torch.tensor([[0.0, 1, 2], [3, 0, 0]]))


def test_metrics_weigh_by_tokens_and_count_skipped_updates() -> None:
    updates = [
        {"loss": 1.0, "skipped_updates": 0.0, "update_tokens": 30.0},
        {"skipped_updates": 1.0},
        {"loss": 3.0, "skipped_updates": 0.0, "update_tokens": 10.0},
    ]
    assert mean_metrics(updates) == {"loss": 1.5, "skipped_updates": 1.0}
    assert mean_metrics([]) == {"loss": 0.0}
