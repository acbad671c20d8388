"""From sequences of tokens to the padded tensors a policy trains on."""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor


class TokenBatch(TypedDict):
    """Right-padded sequences. Causal attention never looks at the padding, so no attention mask is needed.

    `input_ids` [batch, length]; `mask` [batch, length - 1]: whether the prediction at that position, of the next
    token, is one the policy answers for.
    """

    input_ids: Tensor
    mask: Tensor


def collate(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad_id: int) -> TokenBatch:
    """Each prompt followed by its answer, padded to the longest pair."""
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(prompts), length), pad_id)
    mask = torch.zeros((len(prompts), length - 1))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor([*prompt, *answer])
        mask[row, len(prompt) - 1 : end - 1] = 1.0
    return TokenBatch(input_ids=input_ids, mask=mask)


def align(values: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """One value per answered token, put where `mask` [batch, length - 1] has that token; 0 elsewhere."""
    result = torch.zeros(mask.shape)
    for row, given in enumerate(values):
        result[row, mask[row].bool()] = torch.tensor(list(given), dtype=result.dtype)
    return result
