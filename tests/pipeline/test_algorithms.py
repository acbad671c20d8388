import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from rlix.pipeline.algorithms import (
    aggregate,
    clipped_policy_loss,
    entropy,
    gae,
    group_relative_advantages,
    kl_estimate,
    masked_mean,
    reinforce_plus_plus_advantages,
    rloo_advantages,
    token_log_probs,
    value_loss,
)

numbers = st.floats(-10, 10, width=32)
groups = st.integers(2, 6).flatmap(
    lambda size: st.tuples(
        st.just(size), st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=1, max_size=4)
    )
)


def tensor(*rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1)


class TestGroupRelative:
    def test_by_hand(self) -> None:
        # group (1, 2, 3): mean 2, unbiased std 1; group (0, 0, 3): mean 1, std sqrt(3)
        root = math.sqrt(3)
        result = group_relative_advantages(tensor(1, 2, 3, 0, 0, 3), 3)
        assert_close(result, tensor(-1, 0, 1, -1 / root, -1 / root, 2 / root))
        assert_close(group_relative_advantages(tensor(0, 0, 3), 3, normalize_by_std=False), tensor(-1, -1, 2))

    def test_a_group_without_spread_carries_no_signal(self) -> None:
        rewards = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.3, 0.3])  # whose float32 mean is not exactly 0.1
        assert torch.equal(group_relative_advantages(rewards, 3).abs() < 1e-6, torch.ones(6, dtype=torch.bool))

    @given(groups, numbers, st.floats(0.5, 20))
    def test_invariant_to_shift_and_scale(
        self, sized: tuple[int, list[list[float]]], shift: float, scale: float
    ) -> None:
        size, rows = sized
        rewards = torch.round(flat(rows) * 100) / 100
        before = group_relative_advantages(rewards, size)
        assert_close(group_relative_advantages(rewards * scale + shift, size), before, atol=1e-6, rtol=1e-6)

    @given(groups)
    def test_each_group_sums_to_zero_and_has_unit_spread(self, sized: tuple[int, list[list[float]]]) -> None:
        size, rows = sized
        result = group_relative_advantages(flat(rows), size).view(-1, size)
        assert_close(result.sum(1), torch.zeros(len(rows), dtype=torch.float64), atol=1e-5, rtol=0)
        for before, after in zip(flat(rows).view(-1, size), result, strict=True):
            assert_close(float(after.std()), 1.0 if before.std() > 1e-6 else 0.0, atol=1e-5, rtol=0)

    @pytest.mark.parametrize(("shape", "size", "message"), [((4,), 1, "at least 2"), ((5,), 2, r"groups \* 2")])
    def test_shapes_that_cannot_be_groups(self, shape: tuple[int], size: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            group_relative_advantages(torch.zeros(shape), size)


def test_rloo_by_hand() -> None:
    # (1, 2, 6): others' means are 4, 3.5, 1.5
    assert_close(rloo_advantages(tensor(1, 2, 6), 3), tensor(-3, -1.5, 4.5))


@given(groups)
def test_rloo_is_a_rescaled_group_mean(sized: tuple[int, list[list[float]]]) -> None:
    size, rows = sized
    centered = group_relative_advantages(flat(rows), size, normalize_by_std=False)
    assert_close(rloo_advantages(flat(rows), size), centered * size / (size - 1))


def test_reinforce_plus_plus_by_hand() -> None:
    mask = torch.tensor([[1, 1], [1, 0]])
    kl = tensor([0.5, 0.5], [0.5, 99.0])
    # costs 0.1 each; returns: (2 - 0.1 - 0.1, 2 - 0.1) and (1 - 0.1); mean 4.6 / 3
    returns = tensor(1.8, 1.9, 0.9)
    normal = (returns - returns.mean()) / returns.std(unbiased=False)
    result = reinforce_plus_plus_advantages(tensor([0, 2], [1, 99]), mask, kl, kl_coefficient=0.2)
    assert_close(result, tensor([normal[0], normal[1]], [normal[2], 0.0]))
    discounted = reinforce_plus_plus_advantages(tensor([0, 2], [0, 0]), torch.ones(2, 2), discount=0.5)
    returns = tensor(1, 2, 0, 0)
    assert_close(discounted.reshape(-1), (returns - returns.mean()) / returns.std(unbiased=False))


class TestGae:
    def test_by_hand(self) -> None:
        # last: 1 - 0.5 = 0.5; first: 0 + 0.9 * 0.5 - 0.4 = 0.05, plus 0.9 * 0.8 * 0.5 = 0.36
        advantages, returns = gae(tensor([0, 1]), tensor([0.4, 0.5]), torch.ones(1, 2), discount=0.9, smoothing=0.8)
        assert_close(advantages, tensor([0.41, 0.5]))
        assert_close(returns, tensor([0.81, 1.0]))

    def test_positions_outside_the_mask_do_not_exist(self) -> None:
        full, _ = gae(tensor([0, 1]), tensor([0.4, 0.5]), torch.ones(1, 2))
        gappy, returns = gae(tensor([0, 7, 1, 7]), tensor([0.4, 9, 0.5, 9]), torch.tensor([[1, 0, 1, 0]]))
        assert_close(gappy[:, [0, 2]], full)
        assert_close(gappy[:, [1, 3]], tensor([0.0, 0.0]))
        assert_close(returns[:, [1, 3]], tensor([0.0, 0.0]))

    @given(st.lists(numbers, min_size=1, max_size=6))
    def test_without_smoothing_loss_it_is_return_minus_value(self, rewards: list[float]) -> None:
        values = torch.linspace(-1, 1, len(rewards), dtype=torch.float64).unsqueeze(0)
        _, returns = gae(tensor(rewards), values, torch.ones(1, len(rewards)), smoothing=1.0)
        assert_close(returns[0], tensor(*rewards).flip(0).cumsum(0).flip(0))


class TestMaskedMean:
    def test_what_is_masked_out_is_never_read(self) -> None:
        values = torch.tensor([[1.0, math.nan], [3.0, math.inf]], requires_grad=True)
        result = masked_mean(values, torch.tensor([[1, 0], [1, 0]]))
        result.backward()
        assert result.item() == 2.0
        assert values.grad is not None
        assert_close(values.grad, torch.tensor([[0.5, 0.0], [0.5, 0.0]]))

    def test_nothing_selected_is_zero(self) -> None:
        assert masked_mean(torch.ones(2, 3), torch.zeros(2, 3)).item() == 0.0
        assert_close(masked_mean(torch.ones(2, 2), torch.tensor([[0, 0], [0, 1]]), dim=1), torch.tensor([0.0, 1.0]))


class TestAggregate:
    values, mask = tensor([1, 2, 3], [10, 99, 99]), torch.tensor([[1, 1, 1], [1, 0, 0]])

    def test_by_token_and_by_sequence(self) -> None:
        assert aggregate(self.values, self.mask, "token").item() == 16 / 4
        assert aggregate(self.values, self.mask, "sequence").item() == (2 + 10) / 2

    def test_an_empty_sequence_does_not_count(self) -> None:
        assert aggregate(tensor([4, 4], [8, 8]), torch.tensor([[1, 1], [0, 0]]), "sequence").item() == 4

    @pytest.mark.parametrize("aggregation", ["token", "sequence"])
    def test_parts_with_the_global_denominator_add_up(self, aggregation: str) -> None:
        total = 4 if aggregation == "token" else 2
        parts = sum(aggregate(self.values[[i]], self.mask[[i]], aggregation, total) for i in range(2))  # type: ignore[arg-type]
        assert_close(parts, aggregate(self.values, self.mask, aggregation))  # type: ignore[arg-type]

    def test_an_unknown_way(self) -> None:
        with pytest.raises(ValueError, match="'token' or 'sequence'"):
            aggregate(self.values, self.mask, "mean")  # type: ignore[arg-type]


class TestPolicyLoss:
    def test_by_hand(self) -> None:
        # ratios 1.5 (clipped to 1.2 for A > 0, free for A < 0), 0.5 (free for A > 0, clipped to 0.8 for A < 0)
        log_ratio = torch.log(tensor([1.5, 1.5, 0.5, 0.5]))
        advantages = tensor([2, -2, 2, -2])
        result = clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, torch.ones(1, 4))
        assert_close(result.loss.item(), -(1.2 * 2 - 1.5 * 2 + 0.5 * 2 - 0.8 * 2) / 4)
        assert result.clip_fraction.item() == 0.5

    def test_clip_high_lets_good_tokens_rise_further(self) -> None:
        log_ratio = torch.log(tensor([1.5]))
        result = clipped_policy_loss(log_ratio, tensor([0.0]), tensor([1.0]), torch.ones(1, 1), clip_high=0.4)
        assert_close(result.loss.item(), -1.4)

    def test_the_dual_clip_bounds_what_has_a_negative_advantage_and_nothing_else(self) -> None:
        log_ratio = torch.log(tensor([2.0, 2.0, 1.4, 0.1])).requires_grad_()
        given = (torch.zeros(1, 4), tensor([1, -1, -1, -1]), torch.ones(1, 4))
        result = clipped_policy_loss(log_ratio, *given, clip_high=4.0, dual_clip=1.5)
        assert_close(result.loss.item(), (-2.0 + 1.5 + 1.4 + 0.8) / 4)
        assert result.clip_fraction.item() == 0.5
        result.loss.backward()
        assert log_ratio.grad is not None
        assert_close(log_ratio.grad, tensor([-2.0, 0.0, 1.4, 0.0]) / 4)

    def test_clipped_tokens_get_no_gradient(self) -> None:
        log_probs = torch.log(tensor([1.5, 0.9])).requires_grad_()
        clipped_policy_loss(log_probs, tensor([0.0, 0.0]), tensor(1.0), torch.ones(1, 2)).loss.backward()
        assert log_probs.grad is not None
        assert_close(log_probs.grad, tensor([0.0, -0.45]))

    def test_on_policy_the_gradient_is_the_policy_gradient(self) -> None:
        log_probs = tensor([-1.0, -2.0], [-0.5, -3.0]).requires_grad_()
        advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
        clipped_policy_loss(log_probs, log_probs.detach(), advantages, torch.ones(2, 2)).loss.backward()
        assert log_probs.grad is not None
        assert_close(log_probs.grad, tensor([-0.5, -0.5], [0.25, 0.25]))

    def test_padding_may_hold_anything(self) -> None:
        log_probs = torch.tensor([[-1.0, 500.0]], requires_grad=True)
        old = torch.tensor([[-1.0, -math.inf]])
        result = clipped_policy_loss(log_probs, old, torch.ones(1), torch.tensor([[1, 0]]))
        result.loss.backward()
        assert result.loss.item() == -1.0
        assert log_probs.grad is not None
        assert log_probs.grad.tolist() == [[-1.0, 0.0]]


def test_value_loss_takes_the_worse_of_free_and_clipped() -> None:
    # free errors 1 and 0; the clipped prediction 0.2 for both: (0.2 - 0)^2 and (0.2 - 1)^2
    arguments = tensor([1, 1]), tensor([0, 0]), tensor([0, 1]), torch.ones(1, 2)
    assert_close(value_loss(*arguments).item(), 0.5 * (1 + 0.64) / 2)
    assert_close(value_loss(*arguments, clip=None).item(), 0.5 * (1 + 0) / 2)


class TestKl:
    def test_by_hand(self) -> None:
        policy, reference = tensor(math.log(0.5)), tensor(math.log(0.25))
        assert_close(kl_estimate(policy, reference, "k1"), tensor(math.log(2)))
        assert_close(kl_estimate(policy, reference, "k2"), tensor(math.log(2) ** 2 / 2))
        assert_close(kl_estimate(policy, reference, "k3"), tensor(0.5 - 1 + math.log(2)))

    def test_k1_and_k3_are_unbiased(self) -> None:
        policy, reference = tensor(0.2, 0.3, 0.5), tensor(0.4, 0.4, 0.2)
        exact = (policy * (policy / reference).log()).sum()
        for estimator in ("k1", "k3"):
            assert_close((policy * kl_estimate(policy.log(), reference.log(), estimator)).sum(), exact)

    @given(numbers, numbers)
    def test_k3_is_never_negative(self, a: float, b: float) -> None:
        assert kl_estimate(tensor(a), tensor(b), "k3").item() >= 0

    def test_an_unknown_estimator(self) -> None:
        with pytest.raises(ValueError, match="'k1', 'k2' or 'k3'"):
            kl_estimate(tensor(0.0), tensor(0.0), "k4")  # type: ignore[arg-type]


class TestLogits:
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("slice_tokens", [1, 4, 4096])
    def test_slices_change_neither_values_nor_gradients(self, slice_tokens: int) -> None:
        sliced, whole = self.logits.clone().requires_grad_(), self.logits.clone().requires_grad_()
        result = token_log_probs(sliced, self.tokens, temperature=0.7, slice_tokens=slice_tokens)
        expected = (whole / 0.7).log_softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)
        result.square().sum().backward()
        expected.square().sum().backward()
        assert_close(result, expected)
        assert_close(sliced.grad, whole.grad)

    def test_half_precision_logits_are_reduced_in_full(self) -> None:
        half = self.logits.bfloat16()
        assert_close(token_log_probs(half, self.tokens), token_log_probs(half.float(), self.tokens))

    def test_entropy(self) -> None:
        assert_close(entropy(torch.zeros(1, 2, 8)), torch.full((1, 2), math.log(8)))
        expected = torch.distributions.Categorical(logits=self.logits).entropy()
        assert_close(entropy(self.logits, slice_tokens=4), expected)
        assert entropy(torch.tensor([[[0.0, -math.inf]]])).item() == 0.0
