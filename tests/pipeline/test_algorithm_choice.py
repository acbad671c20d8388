"""What the pipelines put together from the algorithms, by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from rlix.pipeline.algorithms import (
    clipped_policy_loss,
    groups_with_spread,
    importance_weights,
    overlong_penalty,
    rewards_less_kl,
    whiten,
)
from rlix.pipeline.algorithms.advantages import highest_covariance
from rlix.pipeline.algorithms.base import Estimate
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.batch import align, stale_tokens, token_rewards
from rlix.pipeline.rollout.rebalance import Estimates, Work, prefers_cached, to_move
from rlix.pipeline.samples import Answer, End, Sample, Samples, Turn, digest, measured
from rlix.pipeline.schedules.ahead import StalenessError, checked
from rlix.pipeline.spec.algorithm import AlgorithmSpec
from rlix.pipeline.spec.schedule import AheadOptions
from rlix.protocol.errors import SpecError
from tests.pipeline.plain_samples import samples_of
from tests.pipeline.training_jobs import agent, ahead, small


def test_groups_whose_rewards_are_all_equal_have_no_spread() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.1, 0.1])
    assert groups_with_spread(rewards, 2).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (Estimate(torch.zeros(3)), r"Estimate of shape \[3\]"),
        (Estimate(torch.zeros(2, 2)), r"Estimate of shape \[2, 2\]"),
        (Estimate(torch.zeros(())), r"Estimate of shape \[\]"),
        (Estimate([0.0] * 4), "returned Estimate"),  # type: ignore[arg-type]
        (torch.zeros(4), r"Tensor of shape \[4\]"),
        (None, "returned NoneType"),
    ],
)
def test_an_estimate_has_an_advantage_for_each_sample(returned: Any, said: str) -> None:
    algorithm: Any = build_algorithm(AlgorithmSpec(), 2)
    algorithm.estimate = lambda *_: returned
    samples = samples_of([0.0] * 4, 2)
    with pytest.raises(TypeError, match=rf"{said}; it must be .* for each of 4 samples"):
        algorithm.prepare(samples, algorithm.begin(samples, 0)[0])
    for given in (torch.zeros(4), torch.zeros(4, 2)):
        algorithm.estimate = lambda *_, given=given: Estimate(given)
        batch, _ = algorithm.begin(samples, 0)
        algorithm.prepare(samples, batch)
        assert batch["advantages"] is given


def test_overlong_penalty_by_hand() -> None:
    # limit 10, buffer 4: free up to 6, then a quarter per token
    lengths = torch.tensor([1, 6, 7, 8, 10])
    assert_close(overlong_penalty(lengths, 10, 4), torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0]))
    assert_close(overlong_penalty(lengths, 10, 0), torch.zeros(5))


def answer(tokens: int) -> Answer:
    return Answer((1,) * tokens, (-0.5,) * tokens, (0,) * tokens)


def test_rewards_are_paid_at_their_turns_and_the_rest_at_the_end() -> None:
    given = ((2, 1.0), (0, 4.0), (2, -0.5), (1, 0.0))  # tokens of a turn, and its reward; one said nothing
    turns = tuple(Turn((0,), answer(tokens), reward) for tokens, reward in given)
    played = [replace(sample("a"), turns=turns), sample("b", (0, 0)), sample("c", counts=False)]
    mask = torch.tensor([[1.0, 1, 0, 0, 1, 1, 0, 1], [1, 1, *[0] * 6], [0] * 8])
    paid = token_rewards(Samples(played, 3), torch.tensor([7.0, 3.0, 9.0]), mask)
    assert paid.tolist() == [[0, 1, 0, 0, 0, -0.5, 0, 6.5], [0, 3, *[0] * 6], [0] * 8]


def test_ppos_lambda_sees_when_a_turn_was_paid() -> None:
    """Two turns of one token, discount 1, lambda 0.5, values 0: half of what comes later is seen at the first."""
    ppo = build_algorithm(AlgorithmSpec(name="ppo", options={"smoothing": 0.5}), 2)
    turns = ((Turn((0,), answer(1), first), Turn((), answer(1), 1.0 - first)) for first in (1.0, 0.0))
    played = Samples([replace(sample("a"), turns=both) for both in turns], 1)
    batch: Any = {"mask": torch.ones(2, 2), "values": torch.zeros(2, 2)}
    found = ppo.estimate(played, batch)
    assert found.returns is not None
    assert_close(found.returns, torch.tensor([[1.0, 0.0], [0.5, 1.0]]))


def test_kl_is_paid_at_each_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]])
    kl = torch.tensor([[9.0, 1.0, 2.0, 9.0], [0.0, 1.0, 0.0, 9.0]])
    expected = torch.tensor([[0.0, -0.5, 2.0, 0.0], [0.0, -0.5, 5.0, 0.0]])
    rewards = torch.tensor([[9.0, 0.0, 3.0, 9.0], [0.0, 0.0, 5.0, 9.0]])
    assert_close(rewards_less_kl(rewards, mask, kl, 0.5), expected)


def test_whitening_by_hand() -> None:
    # 1 and 3: mean 2, biased standard deviation 1
    values, mask = torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[1, 1, 0]])
    assert_close(whiten(values, mask), torch.tensor([[-1.0, 1.0, 0.0]]))


def test_importance_weights_are_truncated_and_scale_each_token() -> None:
    now, then = torch.log(torch.tensor([[0.5, 0.9, 0.1]])), torch.log(torch.tensor([[0.25, 0.1, 0.2]]))
    weights = importance_weights(now, then, torch.tensor([[1, 1, 1]]), cap=3.0)
    assert_close(weights, torch.tensor([[2.0, 3.0, 0.5]]))
    loss = clipped_policy_loss(now, now, torch.tensor([1.0]), torch.ones(1, 3), weights=weights).loss
    assert_close(loss.item(), -(2.0 + 3.0 + 0.5) / 3)


def test_importance_weights_of_sequences_and_without_what_is_out_of_bounds() -> None:
    now = torch.log(torch.tensor([[0.5, 0.5, 0.1], [0.5, 0.9, 0.3]]))
    then = torch.log(torch.tensor([[0.25, 0.25, 0.1], [0.5, 0.3, 0.9]]))  # ratios 2, 2, 1 and 1, 3, 1/3
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])

    def weigh(expected: list[list[float]], **options: Any) -> None:
        assert_close(importance_weights(now, then, mask, **options), torch.tensor(expected))

    weigh([[2.5] * 3, [2.5, 2.5, 1.0]], cap=2.5, level="sequence")
    weigh([[0.0] * 3, [3.0, 3.0, 1.0]], cap=3.5, level="sequence", beyond="drop")
    weigh([[2.0, 2.0, 1.5], [1.5, 2.5, 1.0]], cap=2.5, floor=1.5)
    weigh([[2.0, 2.0, 0.0], [0.0, 0.0, 1.0]], cap=2.5, floor=1.5, beyond="drop")


def test_which_tokens_have_no_gradient_by_their_covariance() -> None:
    # means: log p -2, advantage 0.5; covariances 0.5, -0.5, 4.5 and one that is masked out
    log_probs, advantages = torch.tensor([[-1.0, -1.0], [-4.0, 9.0]]), torch.tensor([[1.0, 0.0], [-1.75, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    centred = advantages[mask.bool()] - advantages[mask.bool()].mean()
    assert_close((log_probs[mask.bool()] + 2.0) * centred, torch.tensor([1.25, 0.25, 3.0]))

    def chosen(share: float, low: float, high: float, seed: int = 0) -> list[list[bool]]:
        bounds = {"share": share, "low": low, "high": high}
        return highest_covariance(log_probs, advantages, mask, **bounds, seed=seed).tolist()

    assert chosen(1.0, 1.0, 5.0) == [[True, False], [True, False]]
    assert chosen(1.0, 2.0, 5.0) == [[False, False], [True, False]]
    assert sum(map(sum, chosen(0.01, 1.0, 5.0))) == 1
    assert chosen(1.0, 5.0, 9.0) == [[False, False], [False, False]]
    assert {str(chosen(0.01, 1.0, 5.0, seed)) for seed in range(9)} == {
        "[[True, False], [False, False]]",
        "[[False, False], [True, False]]",
    }


def test_importance_weights_never_read_what_is_masked_out() -> None:
    now = torch.tensor([[0.0, -math.inf]])
    assert importance_weights(now, torch.zeros(1, 2), torch.tensor([[1, 0]])).tolist() == [[1.0, 1.0]]


def sample(id: str, versions: tuple[int, ...] = (0,), counts: bool = True, **changes: Any) -> Sample:
    answer = Answer(tuple(range(1, 1 + len(versions))), (-0.5,) * len(versions), versions)
    values: dict[str, Any] = {"reward": 1.0, "exact": True, "end": End.DONE, **changes}
    return Sample(id, (Turn((0,), answer),), counts=counts, **values)


def ages_of(samples: Samples) -> tuple[float, ...]:
    """At step 5."""
    metrics = replace(samples, learner=5).metrics()
    return metrics["staleness"], metrics["staleness_max"], metrics["mixed"]


class TestStaleness:
    """Step 5; three answers: of version 4, of versions 3 and 4, and one that does not count."""

    samples = Samples([sample("a", (4, 4)), sample("b", (3, 4)), sample("c", (0, 0), counts=False)], 3)

    def test_within_the_bound_ages_are_told(self) -> None:
        kept, dropped = checked(5, self.samples, AheadOptions(max_staleness=2))
        assert (kept.samples, kept.stale, dropped) == (self.samples.samples, {}, 0)
        assert ages_of(kept) == (1.25, 2, 1)

    def test_what_is_too_old_is_an_error_dropped_or_scored_again(self) -> None:
        with pytest.raises(StalenessError, match="step 5: a token is 2 steps old, the bound is 1"):
            checked(5, self.samples, AheadOptions(max_staleness=1))
        kept, dropped = checked(5, self.samples, AheadOptions(on_stale="drop"))
        assert (kept.counts.tolist(), dropped) == ([True, False, False], 1)
        assert ages_of(kept) == (1, 1, 0)  # of what is learnt from
        kept, dropped = checked(5, self.samples, AheadOptions(on_stale="rescore"))
        assert (kept.counts.tolist(), dropped) == ([True, True, False], 0)
        mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
        assert stale_tokens(kept, mask).tolist() == [[False, False], [True, False], [False, False]]
        mask[1] = 0  # cut off for its length, say
        assert not stale_tokens(kept, mask).any()


def test_values_are_put_where_their_tokens_are() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    assert align([[5, 6], [7]], mask).tolist() == [[0, 5, 6], [7, 0, 0]]


class TestSamples:
    def samples(self, end: End = End.LENGTH) -> Samples:
        wrong = [sample("1", reward=0.5, exact=False), sample("2", reward=0.0, exact=False, end=end)]
        made = [sample("0", (0, 0)), *wrong]
        return Samples(made, 3, measured(made, {}))

    def test_metrics(self) -> None:
        metrics = self.samples().metrics()
        assert (metrics["reward"], metrics["exact"], metrics["trajectories"]) == (0.5, 1 / 3, 3)
        assert metrics["truncated"] == 1 / 3
        assert (metrics["length"], metrics["length_max"]) == (4 / 3, 2)

    def test_exact_is_of_those_of_which_somebody_said_it(self) -> None:
        said, unsaid = sample("0"), sample("1", exact=None)
        assert measured([said, unsaid], {})["exact"] == 1
        assert "exact" not in measured([unsaid], {})

    def test_the_digest_tells_every_token_and_order_apart(self) -> None:
        one = self.samples().metrics()["trajectories_digest"]
        assert one == self.samples().metrics()["trajectories_digest"] == int(one)
        assert one != self.samples(end=End.DONE).metrics()["trajectories_digest"]
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
        dapo = AlgorithmSpec(name="dapo")
        options = dapo.parse()
        assert (options.clip_low, options.clip_high, options.aggregation, dapo.rounds) == (0.2, 0.28, "token", 3)
        given = AlgorithmSpec(name="dapo", options={"clip_high": 0.3}, resample_rounds=0)
        assert (given.parse().clip_high, given.rounds, AlgorithmSpec().rounds) == (0.3, 0, 0)

    def test_weights_come_with_samples_of_older_policies(self) -> None:
        assert (AlgorithmSpec().cap(off_policy=True), AlgorithmSpec().cap(off_policy=False)) == (2.0, None)
        assert AlgorithmSpec(importance_cap=3.0).cap(off_policy=False) == 3.0

    @pytest.mark.parametrize(
        ("make", "changes", "message"),
        [
            (small, {"algorithm": {"name": "pop"}}, "algorithm.name: must be grpo, dr_grpo"),
            (small, {"algorithm": {"options": {"smoothing": 1}}}, "algorithm.options.smoothing: unknown key"),
            (small, {"algorithm": {"options": {"kl_estimator": "k1"}}}, "kl_estimator: k1 does not work in a loss"),
            (small, {"algorithm": {"options": {"kl_estimator": "k4"}}}, "algorithm.options.kl_estimator: must be 'k2'"),
            *(
                (
                    small,
                    {"algorithm": {"name": name, "options": {"kl_estimator": kind}}},
                    f"algorithm.options.kl_estimator: {kind} does not work in a reward",
                )
                for name in ("rloo", "reinforce_pp", "ppo")
                for kind in ("k2", "k3")
            ),
            (small, {"schedule": {"name": "ahed", "options": {}}}, "did you mean 'ahead'?"),
            (ahead, {"rule": {"max_stalness": 1}}, "did you mean 'max_staleness'?"),
            (ahead, {"rule": {"ahead": 2}}, "schedule.options.ahead: 2 exceeds max_staleness 1"),
            (ahead, {"rule": {"max_staleness": 2, "in_flight": "finish"}}, "finish generates one step at a time"),
            (ahead, {"rollout": {"temperature": 0.5}}, "rollout.temperature: importance weights need"),
            (small, {"rollout": {"top_k": 5}, "algorithm": {"importance_cap": 2.0}}, "importance weights need"),
            (agent, {"algorithm": {"options": {"clip_low": 2.0}}}, "algorithm.options.clip_low: must be less than 1"),
        ],
    )
    def test_what_does_not_fit_together_is_said(self, make: object, changes: dict[str, object], message: str) -> None:
        with pytest.raises((SpecError, ValueError)) as caught:
            make(**changes)  # type: ignore[operator]
        assert message in str(caught.value)
