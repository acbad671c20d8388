"""What the pipelines put together from the algorithms: by hand where TRL, if installed, has the same formula."""

import math
from importlib.util import find_spec

import pytest
import torch
from torch.testing import assert_close

from rlix.pipeline.algorithms import (
    clipped_policy_loss,
    groups_with_spread,
    overlong_penalty,
    rewards_at_end,
    truncated_importance_weights,
    whiten,
)
from rlix.pipeline.batch import align
from rlix.pipeline.rebalance import Chunk, Estimates, chunks_to_move, prefers_cached
from rlix.pipeline.rewards import Reward
from rlix.pipeline.router import Sampling, Trajectory
from rlix.pipeline.samples import Samples, digest
from rlix.protocol.errors import SpecError
from tests.pipeline.training_jobs import ahead, ppo, small


def test_groups_whose_rewards_are_all_equal_have_no_spread() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.1, 0.1])
    assert groups_with_spread(rewards, 2).tolist() == [False, True, False]


def test_overlong_penalty_by_hand() -> None:
    # limit 10, buffer 4: free up to 6, then a quarter per token
    lengths = torch.tensor([1, 6, 7, 8, 10])
    assert_close(overlong_penalty(lengths, 10, 4), torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0]))
    assert_close(overlong_penalty(lengths, 10, 0), torch.zeros(5))


def test_rewards_arrive_at_the_last_token_and_kl_is_paid_at_each() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]])
    kl = torch.tensor([[9.0, 1.0, 2.0, 9.0], [0.0, 1.0, 0.0, 9.0]])
    expected = torch.tensor([[0.0, -0.5, 2.0, 0.0], [0.0, -0.5, 5.0, 0.0]])
    assert_close(rewards_at_end(torch.tensor([3.0, 5.0]), mask, kl, 0.5), expected)


def test_whitening_by_hand() -> None:
    # 1 and 3: mean 2, biased standard deviation 1
    values, mask = torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[1, 1, 0]])
    assert_close(whiten(values, mask), torch.tensor([[-1.0, 1.0, 0.0]]))


def test_importance_weights_are_truncated_and_scale_each_token() -> None:
    now, then = torch.log(torch.tensor([[0.5, 0.9, 0.1]])), torch.log(torch.tensor([[0.25, 0.1, 0.2]]))
    weights = truncated_importance_weights(now, then, torch.tensor([[1, 1, 1]]), cap=3.0)
    assert_close(weights, torch.tensor([[2.0, 3.0, 0.5]]))
    loss = clipped_policy_loss(now, now, torch.tensor([1.0]), torch.ones(1, 3), weights=weights).loss
    assert_close(loss.item(), -(2.0 + 3.0 + 0.5) / 3)


def test_importance_weights_never_read_what_is_masked_out() -> None:
    now = torch.tensor([[0.0, -math.inf]])
    assert truncated_importance_weights(now, torch.zeros(1, 2), torch.tensor([[1, 0]])).tolist() == [[1.0, 1.0]]


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_gae_advantages_whiten_as_in_trl() -> None:
    from trl.trainer.utils import masked_whiten

    values, mask = torch.randn(3, 5), torch.rand(3, 5) > 0.3
    # TRL takes the unbiased variance; the two differ by the usual factor.
    n = int(mask.sum())
    expected = torch.where(mask, masked_whiten(values, mask), torch.zeros(3, 5)) * math.sqrt(n / (n - 1))
    assert_close(whiten(values, mask), expected, rtol=1e-4, atol=1e-4)


def test_values_are_put_where_their_tokens_are() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    assert align([[5, 6], [7]], mask).tolist() == [[0, 5, 6], [7, 0, 0]]


class TestSamples:
    def samples(self, last: int = 4) -> Samples:
        tokens = [[1, 2], [3], [4, last]]
        made = [Trajectory(str(i), (0,), 0, Sampling(4), token_ids=t) for i, t in enumerate(tokens)]
        return Samples(made, [Reward(1.0, True), Reward(0.5, False), Reward(0.0, False)])

    def test_metrics(self) -> None:
        metrics = self.samples().metrics()
        assert (metrics["reward"], metrics["exact"], metrics["trajectories"]) == (0.5, 1 / 3, 3)

    def test_the_digest_tells_every_token_and_order_apart(self) -> None:
        one = self.samples().trajectories
        assert digest(one) == digest(self.samples().trajectories)
        assert digest(one) != digest(self.samples(last=5).trajectories)
        assert digest(one) != digest(one[::-1])
        assert float(digest(one)) == digest(one)


class TestRebalance:
    def test_half_the_work_moves_when_moving_is_cheap(self) -> None:
        # knee 4, four chunks of one, 12 tokens left each: 12 * (1 + 4/4) = 24 steps against 1/4 + 12 * (1 + 2/4) = 18.5
        chunks = [Chunk(1, 1, 12.0)] * 4
        estimates = Estimates(4, move_s=0.0, step_s=1.0)
        assert len(chunks_to_move(chunks, [], estimates)) == 2

    def test_nothing_moves_when_the_prefill_costs_more_than_is_gained(self) -> None:
        estimates = Estimates(4, move_s=0.0, step_s=1.0)
        assert chunks_to_move([Chunk(1, 1000, 12.0)] * 4, [], estimates) == []

    def test_nothing_moves_when_the_rest_is_done_before_the_move(self) -> None:
        assert chunks_to_move([Chunk(1, 1, 2.0)] * 4, [], Estimates(4, move_s=10.0, step_s=1.0)) == []

    def test_nothing_moves_before_a_step_was_measured(self) -> None:
        assert chunks_to_move([Chunk(1, 1, 12.0)] * 4, [], Estimates(4)) == []

    def test_a_cached_prefix_is_worth_some_load_and_no_more(self) -> None:
        assert prefers_cached(held=1000, left=100, extra_load=10)
        assert not prefers_cached(held=1000, left=100, extra_load=11)

    def test_what_is_left_is_expected_from_what_ended(self) -> None:
        estimates = Estimates(4)
        assert estimates.expected_left(3, 10) == 7
        estimates.saw_end(6)
        assert (estimates.expected_left(0, 10), estimates.expected_left(4, 10), estimates.expected_left(9, 10)) == (
            6,
            3,
            1,
        )


class TestSpec:
    def test_dapo_brings_its_own_defaults(self) -> None:
        spec = small(algorithm={"name": "dapo", "clip_high": 0.3})
        assert spec.algorithm.clip_high == 0.3
        from rlix.pipeline.spec_training import AlgorithmSpec

        dapo = AlgorithmSpec.model_validate({"name": "dapo"})
        assert (dapo.clip_low, dapo.clip_high, dapo.resample_rounds, dapo.aggregation) == (0.2, 0.28, 3, "token")

    def test_good_ones(self) -> None:
        assert ppo().algorithm.kl_in_reward
        assert ahead().asynchronous is not None

    @pytest.mark.parametrize(
        ("make", "changes", "message"),
        [
            (small, {"algorithm": {"name": "ppo"}}, "pipeline: is full_finetune, which has no critic"),
            (small, {"pipeline": "actor_critic"}, "algorithm.name: must be ppo"),
            (small, {"pipeline": "asynchronous"}, "add e.g. 'asynchronous: {max_staleness: 1}'"),
            (small, {"asynchronous": {"ahead": 1}}, "set 'pipeline: asynchronous'"),
            (ahead, {"rollout": {"temperature": 0.5}}, "rollout.temperature: importance weights need"),
            (ahead, {"algorithm": {"name": "dapo", "resample_rounds": 1}}, "algorithm.resample_rounds"),
        ],
    )
    def test_what_does_not_fit_together_is_said(self, make: object, changes: dict[str, object], message: str) -> None:
        with pytest.raises((SpecError, ValueError)) as caught:
            make(**changes)  # type: ignore[operator]
        assert message in str(caught.value)
