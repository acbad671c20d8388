import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.engine.inference.sampling import sample, uniform

MASK = 2**64 - 1


def reference_mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def reference_uniform(seed: int, position: int) -> float:
    state = reference_mix(seed & MASK) + (position + 1) * 0x9E3779B97F4A7C15 & MASK
    return (reference_mix(state) >> 11) * 2.0**-53


def draw(logits: torch.Tensor, seeds: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0):
    rows = len(seeds)
    return sample(
        logits.expand(rows, -1),
        seeds,
        torch.zeros_like(seeds),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
    )


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))
def test_uniform_equals_the_reference_in_unbounded_integers(seed: int, position: int) -> None:
    assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == reference_uniform(seed, position)


def test_uniform_known_values() -> None:
    # First output of Vigna's splitmix64 from state 0 is 0xE220A8397B1DCDAF; mix(0) is 0, so stream 0 starts with it.
    assert uniform(torch.tensor([0]), torch.tensor([0])).item() == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniform_is_flat(along: str) -> None:
    count, cells = 100_000, 100
    moving, fixed = torch.arange(count), torch.full((count,), 7)
    u = uniform(moving, fixed) if along == "seeds" else uniform(fixed, moving)
    expected = count / cells
    chi2 = ((torch.histc(u, cells, 0, 1) - expected) ** 2 / expected).sum().item()
    assert 50 < chi2 < 160  # 99 degrees of freedom: mean 99, standard deviation 14
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 0.015


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    tokens, logprobs = draw(probs.log(), torch.arange(40_000))
    shares = torch.bincount(tokens, minlength=4) / 40_000
    assert torch.allclose(shares, probs, atol=0.01)
    assert torch.allclose(logprobs, probs.log()[tokens], atol=1e-6)


def test_temperature_changes_draws_but_not_reported_logprobs() -> None:
    probs = torch.tensor([0.8, 0.2])
    tokens, logprobs = draw(probs.log(), torch.arange(40_000), temperature=2.0)
    # sqrt(0.8) : sqrt(0.2) = 2 : 1
    assert (tokens == 0).float().mean().item() == pytest.approx(2 / 3, abs=0.01)
    assert torch.allclose(logprobs, probs.log()[tokens], atol=1e-6)


def test_greedy_takes_the_first_maximum() -> None:
    tokens, logprobs = draw(torch.tensor([0.0, 3.0, 3.0]), torch.arange(5), temperature=0.0)
    assert tokens.tolist() == [1] * 5
    assert logprobs[0].item() == pytest.approx(-0.717736, abs=1e-5)  # 3 - log(1 + 2 e^3)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, {0, 1, 2, 3}),
        (1.0, 2, {1, 3}),
        (1.0, 1, {3}),
        (0.39, 0, {3}),  # 0.4 alone reaches it
        (0.41, 0, {1, 3}),
        (0.71, 0, {0, 1, 3}),
        (0.6, 2, {1, 3}),  # of what top-k left: 0.4/0.7 = 0.57 does not reach 0.6
        (0.55, 2, {3}),
        (1.0, 99, {0, 1, 2, 3}),
    ],
)
def test_top_k_and_top_p_keep_exactly(top_p: float, top_k: int, kept: set[int]) -> None:
    tokens, _ = draw(torch.tensor([0.2, 0.3, 0.1, 0.4]).log(), torch.arange(2_000), top_p=top_p, top_k=top_k)
    assert set(tokens.tolist()) == kept


def test_filtered_draws_keep_the_relative_odds() -> None:
    tokens, _ = draw(torch.tensor([0.2, 0.3, 0.1, 0.4]).log(), torch.arange(40_000), top_k=2)
    assert (tokens == 3).float().mean().item() == pytest.approx(4 / 7, abs=0.01)


@given(st.permutations(range(12)), st.integers(1, 12))
def test_a_row_does_not_depend_on_its_batch(order: list[int], size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 33, generator=generator)
    rows = (
        logits,
        torch.arange(12) * 1_000_003,
        torch.arange(12),
        torch.tensor([0.0, 0.7, 1.0] * 4),
        torch.tensor([1.0, 0.9, 0.5, 1.0] * 3),
        torch.tensor([0, 5] * 6),
    )
    tokens, logprobs = sample(*rows)
    chosen = torch.tensor(order[:size])
    some_tokens, some_logprobs = sample(*(column[chosen] for column in rows))
    assert torch.equal(some_tokens, tokens[chosen])
    assert torch.equal(some_logprobs, logprobs[chosen])


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, 0.0, float("-inf")])
    tokens, _ = draw(logits, torch.arange(5_000))
    assert set(tokens.tolist()) == {1, 2}
