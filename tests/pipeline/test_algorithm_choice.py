"""What the pipelines put together from the algorithms, by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from rlix.pipeline.ahead import StalenessError, correct_staleness
from rlix.pipeline.algorithms import (
    clipped_policy_loss,
    groups_with_spread,
    overlong_penalty,
    rewards_at_end,
    truncated_importance_weights,
    whiten,
)
from rlix.pipeline.batch import align
from rlix.pipeline.policy import PolicyBatch
from rlix.pipeline.rollout.rebalance import Estimates, Work, prefers_cached, to_move
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.samples import Samples, digest
from rlix.pipeline.sources.rewards import Reward
from rlix.pipeline.spec.training import AlgorithmSpec, AsynchronousSpec
from rlix.protocol.errors import SpecError
from tests.pipeline.training_jobs import agent, ahead, ppo, small


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


class TestStaleness:
    """Step 5; three answers: of version 4, of versions 3 and 4, and one that is masked out."""

    def batch(self) -> PolicyBatch:
        return PolicyBatch(
            input_ids=torch.zeros(3, 3, dtype=torch.long),
            mask=torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
            old_log_probs=torch.log(torch.tensor([[0.5, 0.5], [0.8, 0.1], [0.5, 0.5]])),
            behavior_log_probs=torch.log(torch.tensor([[0.5, 0.25], [0.1, 0.2], [0.1, 0.1]])),
            versions=torch.tensor([[4.0, 4.0], [3.0, 4.0], [0.0, 0.0]]),
        )

    def test_within_the_bound_tokens_are_weighted(self) -> None:
        batch = self.batch()
        metrics = correct_staleness(5, batch, AsynchronousSpec(max_staleness=2, importance_cap=3.0))
        assert_close(batch["importance"], torch.tensor([[1.0, 2.0], [3.0, 0.5], [1.0, 1.0]]))
        expected = {"staleness": 1.25, "staleness_max": 2, "mixed": 1, "importance": 6.5 / 4, "dropped": 0}
        assert metrics == pytest.approx(expected)
        assert batch.keys() == {"input_ids", "mask", "old_log_probs", "importance"}

    def test_what_is_too_old_is_an_error_dropped_or_scored_again(self) -> None:
        with pytest.raises(StalenessError, match="step 5: a token is 2 steps old, the bound is 1"):
            correct_staleness(5, self.batch(), AsynchronousSpec(max_staleness=1))
        batch = self.batch()
        assert correct_staleness(5, batch, AsynchronousSpec(on_stale="drop"))["dropped"] == 1
        assert batch["mask"].tolist() == [[1, 1], [0, 0], [0, 0]]
        batch = self.batch()
        assert correct_staleness(5, batch, AsynchronousSpec(on_stale="rescore", importance_cap=3.0))["dropped"] == 0
        assert_close(batch["importance"], torch.tensor([[1.0, 2.0], [1.0, 0.5], [1.0, 1.0]]))


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
        one = self.samples().metrics()["trajectories_digest"]
        assert one == self.samples().metrics()["trajectories_digest"] == int(float(one))
        assert one != self.samples(last=5).metrics()["trajectories_digest"]
        assert digest([("a", 1), ("b", 2)]) != digest([("b", 2), ("a", 1)])


class TestRebalance:
    def test_half_the_work_moves_when_moving_is_cheap(self) -> None:
        # knee 4, four chunks of one, 12 tokens left each: 12 * (1 + 4/4) = 24 steps against 1/4 + 12 * (1 + 2/4) = 18.5
        chunks = [Work(1, 12.0)] * 4
        estimates = Estimates(4, move_s=0.0, step_s=1.0)
        assert len(to_move(chunks, [], estimates)) == 2

    def test_nothing_moves_when_the_prefill_costs_more_than_is_gained(self) -> None:
        estimates = Estimates(4, move_s=0.0, step_s=1.0)
        assert to_move([Work(1000, 12.0)] * 4, [], estimates) == []

    def test_nothing_moves_when_the_rest_is_done_before_the_move(self) -> None:
        assert to_move([Work(1, 2.0)] * 4, [], Estimates(4, move_s=10.0, step_s=1.0)) == []

    def test_nothing_moves_before_a_step_was_measured(self) -> None:
        assert to_move([Work(1, 12.0)] * 4, [], Estimates(4)) == []

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
            (
                agent,
                {"asynchronous": None},
                "section and 'pipeline: asynchronous_agentic' belong together",
            ),
            (agent, {"pipeline": "agentic"}, "set 'pipeline: asynchronous_agentic'"),
            (agent, {"pipeline": "asynchronous"}, "no environment; set 'pipeline: asynchronous_agentic'"),
            (ahead, {"pipeline": "asynchronous_agentic"}, "environment: is missing"),
            (ahead, {"rollout": {"temperature": 0.5}}, "rollout.temperature: importance weights need"),
            (ahead, {"algorithm": {"name": "dapo", "resample_rounds": 1}}, "algorithm.resample_rounds"),
        ],
    )
    def test_what_does_not_fit_together_is_said(self, make: object, changes: dict[str, object], message: str) -> None:
        with pytest.raises((SpecError, ValueError)) as caught:
            make(**changes)  # type: ignore[operator]
        assert message in str(caught.value)
