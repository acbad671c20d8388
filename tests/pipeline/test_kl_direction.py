"""Whether a KL to the reference pulls towards it: of each estimate exactly, of each algorithm by a short run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlix.pipeline.algorithms import Algorithm, Scores, kl_estimate
from rlix.pipeline.algorithms.choice import CLASSES, build_algorithm
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.samples import Samples
from rlix.pipeline.spec.algorithm import ALGORITHMS, AlgorithmSpec
from rlix.protocol.errors import SpecError
from tests.pipeline.plain_samples import samples_of

WORDS, GROUP, SAMPLES, STEPS = 4, 4, 256, 40
OPTIONS: dict[str, dict[str, Any]] = {"gspo": {"clip_low": 0.2, "clip_high": 0.2}}


def logits(seed: int) -> Tensor:
    """[1 + words, words]: of the first of two words, and of the second after each first one."""
    return torch.randn(1 + WORDS, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_kl(policy: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) of the two words together, over all sixteen pairs."""
    ours, theirs = policy.log_softmax(-1), reference.log_softmax(-1)
    each = (ours.exp() * (ours - theirs)).sum(-1)
    return each[0] + (ours[0].exp() * each[1:]).sum()


class TestExpectedGradient:
    """Over one word, exactly: the expectation over all four."""

    start, reference = logits(0)[0], logits(1)[0]

    def expected(self, term: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The expected gradient of a term of the loss, of words drawn from the policy itself."""
        parameters = self.start.clone().requires_grad_()
        ours = parameters.log_softmax(-1)
        (gradient,) = torch.autograd.grad(
            (ours.detach().exp() * term(ours, self.reference.log_softmax(-1))).sum(), parameters
        )
        return gradient

    def gradient(self, divergence: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        parameters = self.start.clone().requires_grad_()
        value = divergence(parameters.log_softmax(-1), self.reference.log_softmax(-1))
        return torch.autograd.grad(value, parameters)[0]

    def test_as_a_term_of_the_loss(self) -> None:
        def forward(ours: Tensor, theirs: Tensor) -> Tensor:
            return (theirs.exp() * (theirs - ours)).sum()

        def reverse(ours: Tensor, theirs: Tensor) -> Tensor:
            return (ours.exp() * (ours - theirs)).sum()

        assert_close(self.expected(lambda o, t: kl_estimate(o, t, "k1")), torch.zeros(WORDS, dtype=torch.float64))
        assert_close(self.expected(lambda o, t: kl_estimate(o, t, "k2")), self.gradient(reverse))
        assert_close(self.expected(lambda o, t: kl_estimate(o, t, "k3")), self.gradient(forward))

    def test_as_a_cost_in_the_reward(self) -> None:
        def paid(estimator: Any) -> Tensor:
            return self.expected(lambda o, t: kl_estimate(o, t, estimator).detach() * o)

        exact = self.gradient(lambda ours, theirs: (ours.exp() * (ours - theirs)).sum())
        assert_close(paid("k1"), exact)
        for estimator in ("k2", "k3"):
            assert not torch.allclose(paid(estimator), exact, rtol=0.3)


@dataclass
class Tiny:
    """A policy of two words that one algorithm trains with nothing but its penalty: every reward is 0."""

    algorithm: Algorithm
    reference: Tensor
    parameters: Tensor

    def divergence(self) -> float:
        return float(exact_kl(self.parameters.detach(), self.reference))

    def log_probs(self, table: Tensor, words: Tensor) -> Tensor:
        """[samples, 2]."""
        rows = torch.stack([torch.zeros_like(words[:, 0]), 1 + words[:, 0]], dim=1)
        return table.log_softmax(-1)[rows, words]

    def sampled(self, source: torch.Generator) -> Tensor:
        p = self.parameters.detach().softmax(-1)
        first = torch.multinomial(p[0], SAMPLES, replacement=True, generator=source)
        second = torch.multinomial(p[1 + first], 1, generator=source)[:, 0]
        return torch.stack([first, second], dim=1)

    def step(self, source: torch.Generator, rate: float) -> None:
        words = self.sampled(source)
        log_probs, mask = self.log_probs(self.parameters, words), torch.ones(SAMPLES, 2)
        batch = PolicyBatch(
            input_ids=words,
            mask=mask,
            old_log_probs=log_probs.detach(),
            reference_log_probs=self.log_probs(self.reference, words),
            values=torch.zeros(SAMPLES, 2),
        )
        batch["advantages"] = self.algorithm.estimate(samples_of([0.0] * SAMPLES, GROUP, tokens=2), batch).advantages
        loss = self.algorithm.loss(Scores(log_probs, torch.zeros(SAMPLES, 2)), batch, self.algorithm.denominator(mask))[
            0
        ]
        (gradient,) = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            self.parameters -= rate * gradient


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"sft", "dpo"}))  # which learn from what is given
def test_nothing_but_the_penalty_leads_to_the_reference(name: str) -> None:
    options = {"kl_coefficient": 0.5, **OPTIONS.get(name, {})} if name != "distill" else {"teacher": "the reference"}
    reference = logits(1)
    algorithm = build_algorithm(AlgorithmSpec(name=name, options=options), 2)
    tiny = Tiny(algorithm, reference, (reference + 0.8 * logits(2)).requires_grad_())
    begin, source = tiny.divergence(), torch.Generator().manual_seed(3)
    for step in range(STEPS):
        tiny.step(source, rate=4.0 * (1 - step / STEPS))
    assert 0.3 < begin < 1
    assert tiny.divergence() < 0.05 * begin, (begin, tiny.divergence())


def test_which_algorithms_have_it_in_the_reward_is_said_once_for_both_sides() -> None:
    for name, kind in CLASSES.items():
        options = {"distill": {"teacher": "the reference"}, "dpo": {}}.get(name, {"kl_coefficient": 0.1})
        spec = AlgorithmSpec(name=name, options=options)
        needs = kind.needs(spec.parse())
        assert spec.needs(off_policy=False) == needs, name
        assert needs.old_log_probs == (kind.kl_in_reward or needs.critic is not None or name == "clip_cov"), name


@dataclass(frozen=True)
class OwnOptions:
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.1


class OwnInReward(Algorithm):
    Options = OwnOptions
    kl_in_reward = True

    def estimate(self, samples: Samples, batch: PolicyBatch) -> Any:
        raise NotImplementedError


class WithoutOptions(OwnInReward):
    Options = Algorithm.Options


class OwnInLoss(OwnInReward):
    kl_in_reward = False


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("OwnInReward", {"kl_estimator": "k3"}, "k3 does not work in a reward"),
        ("OwnInReward", {"kl_estimator": "k2"}, "k2 does not work in a reward"),
        ("OwnInLoss", {"kl_estimator": "k1"}, "k1 does not work in a loss"),
        ("OwnInReward", {"kl_estimator": "k1"}, None),
        ("OwnInReward", {}, None),  # k1 is used, whatever its options' default is for a loss
        ("WithoutOptions", {"kl_coefficient": 0.1}, None),
        ("OwnInLoss", {}, None),
    ],
)
def test_an_algorithm_of_the_users_is_held_to_the_same(kind: str, options: dict[str, Any], said: str | None) -> None:
    spec = AlgorithmSpec(name=f"{__name__}:{kind}", options=options)
    if said is None:
        assert cast(Any, spec.parse()).kl_coefficient == 0.1
        return
    with pytest.raises(SpecError, match=f"algorithm.options.kl_estimator: {said}"):
        spec.parse()
