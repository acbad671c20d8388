"""Which rows of a batch go through the model together, and how they lie in it. Pure functions.

A batch is a dictionary of tensors with one row per sequence: `input_ids` [rows, length], `mask` [rows, length - 1] of
the predictions that count, and whatever else the loss needs, [rows] or [rows, length - 1].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHORTEST = 2  # tokens of a sequence that predicts anything


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch, cut to the longest of them. Without `rows` it stands in for work that others still have."""

    rows: tuple[int, ...]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a model is called with: `input_ids`, and `position_ids` that start anew where a packed sequence begins.

    `predictions`: where, in the flattened [rows × length] outputs, those lie that the mask counts, in the mask's order.
    """

    tensors: dict[str, Tensor]
    predictions: Tensor


def row_lengths(mask: Tensor) -> list[int]:
    """Tokens of each row up to the last that `mask` [rows, length - 1] counts; at least 2."""
    positions = torch.arange(SHORTEST, mask.shape[1] + SHORTEST, device=mask.device)
    lengths: list[int] = (mask.bool() * positions).amax(1).clamp(min=SHORTEST).tolist()
    return lengths


def plan(lengths: Sequence[int], budget: int, *, packed: bool = False) -> list[tuple[int, ...]]:
    """Rows of like length together, the longest first, so that each group has at most `budget` tokens.

    Padding to a group's longest row counts, unless the rows are `packed` one after the other. A row longer than the
    budget is a group of its own.
    """
    groups: list[list[int]] = []
    used = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        longest = lengths[groups[-1][0]] if groups else 0
        more = lengths[row] if packed else longest
        if groups and used + more <= budget:
            groups[-1].append(row)
            used += more
        else:
            groups.append([row])
            used = lengths[row]
    return [tuple(sorted(group)) for group in groups]


def micro_batches(batch: Mapping[str, Tensor], groups: Sequence[Sequence[int]], count: int) -> list[MicroBatch]:
    """The groups' rows, then as many short ones that count for nothing as are missing to `count`."""
    lengths = row_lengths(batch["mask"])
    parts = [MicroBatch(tuple(rows), _cut(batch, rows, max(lengths[row] for row in rows))) for rows in groups]
    empty = _cut(batch, [0], SHORTEST)
    empty["mask"] = torch.zeros_like(empty["mask"])
    return parts + [MicroBatch((), dict(empty)) for _ in range(count - len(parts))]


def model_inputs(batch: Mapping[str, Tensor], *, packed: bool = False) -> ModelInputs:
    """Rows padded to the longest, or `packed` one after the other in a single row without padding.

    Attention is causal, so padding on the right is never looked at; packed sequences are told apart by their positions.
    The last token of a row predicts nothing and stays out.
    """
    ids, mask = batch["input_ids"][:, :-1], batch["mask"].bool()
    if not packed:
        return ModelInputs({"input_ids": ids}, mask.flatten().nonzero().squeeze(1))
    lengths = torch.tensor(row_lengths(mask), device=mask.device) - 1
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    inside = positions < lengths.unsqueeze(1)
    tensors = {"input_ids": ids[inside].unsqueeze(0), "position_ids": positions[inside].unsqueeze(0)}
    return ModelInputs(tensors, mask[inside].nonzero().squeeze(1))


def in_place(values: Tensor, mask: Tensor) -> Tensor:
    """One value per counted prediction, put where `mask` [rows, length - 1] has it; 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask.bool(), values)


def _cut(batch: Mapping[str, Tensor], rows: Sequence[int], length: int) -> dict[str, Tensor]:
    chosen = torch.tensor(rows)
    return {
        name: value[chosen] if value.dim() == 1 else value[chosen, : length if name == "input_ids" else length - 1]
        for name, value in batch.items()
    }
