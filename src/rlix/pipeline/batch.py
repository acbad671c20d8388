"""From sequences of tokens to the padded tensors a policy trains on."""

from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict, cast

import torch
from torch import Tensor

from rlix.engine.parallel import NeedParallel
from rlix.pipeline.samples import Sample, Samples
from rlix.pipeline.training.micro_batches import row_lengths

Row = tuple[Sequence[int], Sequence[bool]]
"""Tokens, and which of them are learnt (none, when empty)."""


class TokenBatch(TypedDict):
    """Right-padded sequences. Causal attention never looks at the padding, so no attention mask is needed.

    `input_ids` [batch, length]; `mask` [batch, length - 1]: whether the prediction at that position, of the next
    token, is one the policy answers for.
    """

    input_ids: Tensor
    mask: Tensor


class PolicyBatch(TokenBatch):
    """Sequences with what algorithms need, each [batch, length - 1]; `advantages` may be [batch].

    `sampled_log_probs`: as whoever generated the tokens saw them; `importance`: each token's weight in the loss;
    `values`: the critic's estimate before each token, `returns`: what it should have been.
    """

    advantages: NotRequired[Tensor]
    importance: NotRequired[Tensor]
    old_log_probs: NotRequired[Tensor]
    reference_log_probs: NotRequired[Tensor]
    returns: NotRequired[Tensor]
    sampled_log_probs: NotRequired[Tensor]
    values: NotRequired[Tensor]


def collate(rows: Sequence[Row], pad_id: int) -> TokenBatch:
    """The rows, padded to the longest."""
    length = max(2, *(len(tokens) for tokens, _ in rows))
    input_ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros((len(rows), length - 1))
    for row, (tokens, learnt) in enumerate(rows):
        input_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        if learnt:
            mask[row, : len(tokens) - 1] = torch.tensor(learnt[1:], dtype=mask.dtype)
    return TokenBatch(input_ids=input_ids, mask=mask)


def policy_batch(samples: Samples, pad_id: int, learns_from: Callable[[Sample], bool]) -> PolicyBatch:
    """One row for each sample; of those that are not learnt from the mask is empty."""
    rows = [(s.token_ids, s.from_policy if learns_from(s) else ()) for s in samples.samples]
    tokens = collate(rows, pad_id)
    mask = tokens["mask"]
    given = [s.logprobs if row.any() else () for s, row in zip(samples.samples, mask, strict=True)]
    return PolicyBatch(input_ids=tokens["input_ids"], mask=mask, sampled_log_probs=align(given, mask))


def stale_tokens(samples: Samples, mask: Tensor) -> Tensor:
    """Which tokens under `mask` [samples, length - 1] a schedule has marked as too old: bool, of the same shape."""
    marks = zip(samples.samples, mask, strict=True)
    learnt = [samples.stale.get(s.id, [False] * s.generated) if row.any() else () for s, row in marks]
    return align(learnt, mask).bool()


def token_rewards(samples: Samples, rewards: Tensor, mask: Tensor) -> Tensor:
    """What each token under `mask` [samples, length - 1] is paid: each turn's reward at the turn's last token, and what
    is left of the sample's, in `rewards` [samples], at the sample's last. A row sums to its sample's reward."""
    paid: list[Sequence[float]] = []
    for sample, reward, row in zip(samples.samples, rewards.tolist(), mask, strict=True):
        of_one = [0.0] * (sample.generated if row.any() else 0)
        end, of_turns = 0, 0.0
        for turn in sample.turns if of_one else ():
            end += len(turn.answer.token_ids)
            if turn.answer.token_ids:
                of_one[end - 1] += turn.reward
                of_turns += turn.reward
        if of_one:
            of_one[-1] += reward - of_turns
        paid.append(of_one)
    return align(paid, mask)


def per_turn(values: Tensor, samples: Samples, mask: Tensor) -> Tensor:
    """`values` [samples, most turns] at all tokens of each turn under `mask` [samples, length - 1]; of its shape."""
    rows = zip(samples.samples, values.tolist(), mask, strict=True)
    return align([_repeated(s, given) if row.any() else () for s, given, row in rows], mask)


def _repeated(sample: Sample, given: Sequence[float]) -> list[float]:
    return [value for turn, value in zip(sample.turns, given, strict=False) for _ in turn.answer.token_ids]


def align(values: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """One value per learnt token, put where `mask` [batch, length - 1] has that token; 0 elsewhere."""
    result = torch.zeros(mask.shape)
    for row, given in enumerate(values):
        result[row, mask[row].bool()] = torch.tensor(list(given), dtype=result.dtype)
    return result


def tokens_of(batch: PolicyBatch) -> TokenBatch:
    """The tokens alone, for passes that need nothing else."""
    return TokenBatch(input_ids=batch["input_ids"], mask=batch["mask"])


def over_ranks(batch: TokenBatch) -> NeedParallel:
    """The batch for all ranks, each with about as many tokens: all wait for the one that has most."""
    return NeedParallel(batch, costs=row_lengths(batch["mask"]))


def shuffled_parts(batch: PolicyBatch, count: int, seed: int) -> list[PolicyBatch]:
    """The rows in `count` parts as equal as they can be, in an order that the seed decides; one part as it is."""
    if count == 1:
        return [batch]
    order = torch.randperm(len(batch["input_ids"]), generator=torch.Generator().manual_seed(seed))
    return [
        cast(PolicyBatch, {k: cast(Tensor, v)[rows] for k, v in batch.items()}) for rows in order.tensor_split(count)
    ]
