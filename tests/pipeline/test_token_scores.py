"""Scores from hidden states: values, gradients, and how much memory they take."""

import pytest
import torch
from torch.testing import assert_close

from rlix.pipeline.training.causal_lm import _answering
from rlix.pipeline.training.token_scores import chosen_scores


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((7, 5), (11, 5), (11,))
    )
    return hidden, weight, bias, torch.randint(0, 11, (7,), generator=source)


@pytest.mark.parametrize("logits_at_once", [1, 22, 33, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_are_those_of_whole_logits(logits_at_once: int, temperature: float) -> None:
    hidden, weight, bias, tokens = inputs()
    given = chosen_scores(hidden, weight, bias, tokens, temperature=temperature, logits_at_once=logits_at_once)
    distribution = torch.distributions.Categorical(logits=(hidden @ weight.T + bias) / temperature)
    assert_close(given, (distribution.log_prob(tokens), distribution.entropy()))


@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_of_both_results(with_bias: bool) -> None:
    hidden, weight, bias, tokens = inputs()
    given = (hidden, weight, bias if with_bias else None)
    torch.autograd.gradcheck(
        lambda *parts: chosen_scores(*parts, tokens, temperature=0.7, logits_at_once=30),
        given,
    )


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    weight.requires_grad_(False)
    chosen_scores(hidden, weight, None, tokens)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_half_precision_is_widened_before_the_softmax() -> None:
    hidden, weight, _, tokens = inputs(torch.bfloat16)
    log_probs, entropies = chosen_scores(hidden, weight, None, tokens)
    expected = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    assert_close(log_probs, expected.gather(1, tokens[:, None])[:, 0])
    assert_close(entropies, -(expected.exp() * expected).sum(-1))
    log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_the_heads_gradient_adds_up_in_float32() -> None:
    """Every token pulls at the same weights: in bfloat16 the sum of 4,096 chunks stays at 256 of them."""
    source = torch.Generator().manual_seed(0)
    count, width, words = 4096, 4, 3
    exact = torch.ones(count, width, dtype=torch.float64) + 0.1 * torch.rand(count, width, generator=source)
    tokens = torch.zeros(count, dtype=torch.long)

    def gradients(dtype: torch.dtype, at_once: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = exact.bfloat16().to(dtype)
        weight, bias = torch.zeros(words, width, dtype=dtype), torch.zeros(words, dtype=dtype)
        given = weight.requires_grad_(), bias.requires_grad_()
        chosen_scores(hidden, *given, tokens, logits_at_once=at_once)[0].sum().backward()
        assert weight.grad is not None and bias.grad is not None
        return weight.grad.double(), bias.grad.double()

    for expected, found in zip(gradients(torch.float64, 10**9), gradients(torch.bfloat16, words), strict=True):
        assert_close(found, expected, rtol=0.01, atol=0.0)


def test_no_tokens_give_gradients_of_zero() -> None:
    hidden, weight, _, tokens = inputs()
    log_probs, _ = chosen_scores(hidden[:0], weight, None, tokens[:0])
    log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


def test_nothing_of_the_size_of_the_logits_is_kept_for_the_backward_pass() -> None:
    kept: list[int] = []
    hidden, weight, _, tokens = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        chosen_scores(hidden, weight, None, tokens)
    assert kept and max(kept) < 7 * 11


def test_what_a_head_answers_is_no_view() -> None:
    """FSDP warns of one that is, at every job's start, in the log of what the job's code prints."""
    head = torch.nn.Linear(5, 11)
    with _answering(head, torch.tensor([0, 2, -1]), torch.tensor([3, 4, 5]), 1.0):
        answers = head(torch.randn(1, 4, 5, requires_grad=True))
    assert answers.shape == (1, 4, 2)
    assert not answers._is_view()
    assert (answers[0, [1, 3]] == 0).all()
