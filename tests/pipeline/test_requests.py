"""Passes and steps that are asked for one by one: the named losses, and gradients that wait while others compute."""

from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from rlix.engine.lora import AdapterConfig
from rlix.pipeline.requests.losses import OPTIONS, RequestedLoss
from rlix.pipeline.requests.module import AdamStep, requested_on_meta
from rlix.pipeline.requests.turns import Turns
from rlix.pipeline.spec.training import OptimizerSpec, TrainingSpec
from rlix.protocol.errors import SpecError
from tests.pipeline.training_scenarios import built, write_model

WAIT_S = 300.0
ADAM = AdamStep(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0)
LOG_PROBS = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, -9.0]])
OLD = torch.tensor([[-1.5, -1.0, -0.5], [-0.4, -2.0, 0.0]])
ADVANTAGES = torch.tensor([[1.0, -2.0, 0.5], [3.0, -1.0, 0.0]])
LEARNT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def formula(name: str) -> torch.Tensor:
    """As Tinker's manual writes them, token by token."""
    ratio = (LOG_PROBS - OLD).exp()
    clipped = ratio.clamp(0.8, 1.2)
    if name == "importance_sampling":
        terms = -ratio * ADVANTAGES
    elif name == "ppo":
        terms = -torch.minimum(ratio * ADVANTAGES, clipped * ADVANTAGES)
    elif name == "cispo":
        terms = -clipped * LOG_PROBS * ADVANTAGES
    elif name == "dro":
        terms = -(LOG_PROBS * ADVANTAGES - 0.5 * 0.05 * (LOG_PROBS - OLD).square())
    else:  # gspo: the ratio of a sequence, geometric mean over its tokens
        mean = ((LOG_PROBS - OLD) * LEARNT).sum(1, keepdim=True) / LEARNT.sum(1, keepdim=True)
        ratio = mean.exp().expand_as(LOG_PROBS)
        terms = -torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES)
    return (terms * LEARNT).sum()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "cross_entropy"])
def test_a_named_loss_is_the_sum_over_tokens(name: str) -> None:
    part = {"mask": torch.ones(2, 3), "learnt": LEARNT, "logprobs": OLD, "advantages": ADVANTAGES}
    found = RequestedLoss.named(name, {}).of(LOG_PROBS, part, 1.0)
    assert float(found) == pytest.approx(float(formula(name)), rel=1e-6)


def test_cross_entropy_weighs_each_target() -> None:
    weights = torch.tensor([[0.0, 2.0, -1.0], [0.5, 0.0, 1.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    loss = RequestedLoss.named("cross_entropy", {})
    assert float(loss.of(LOG_PROBS, {"mask": mask, "weights": weights}, 1.0)) == pytest.approx(4.0 - 0.5 + 0.05)
    several = {"mask": mask, "weights": torch.stack([weights, weights], 2)}
    assert float(loss.of(torch.stack([LOG_PROBS, LOG_PROBS], 2), several, 1.0)) == pytest.approx(2 * 3.55)


@pytest.mark.parametrize("options", [{"beta": 1.0}, {"clip_low_threshold": "x"}, {"clip_high_threshold": float("inf")}])
def test_a_wrong_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="option"):
        RequestedLoss.named("ppo", options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


def module(folder: Path, *names: str) -> Any:
    made = built(requested_on_meta(folder), folder)
    made.configure_optimizer(OptimizerSpec(), TrainingSpec(micro_batch_tokens=14))
    for name in names:
        made.add_adapter(name, AdapterConfig(4, 8.0), OptimizerSpec(), 1, len(name))
    return made


def batch(seed: int, *, several: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 17, (3, 7), generator=random)
    mask = torch.ones(3, 6)
    mask[1, 4:] = 0
    shape = (3, 6, several) if several else (3, 6)
    targets = torch.randint(1, 17, shape, generator=random)
    return {"input_ids": ids, "mask": mask, "targets": targets, "weights": torch.rand(shape, generator=random)}


CROSS = RequestedLoss.named("cross_entropy", {})


def train(made: Any, name: str | None, seed: int, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        parts = [batch(seed + 10 * step + part) for part in range(2)]
        losses += [made.requested_pass(part, CROSS, name, backward=True)["loss"] for part in parts]
        made.requested_step(ADAM, name)
    return losses


def test_gradients_wait_while_others_compute(folder: Path) -> None:
    alone = {name: train(module(folder, name), name, len(name), 3) for name in ("a", "bb")}
    both, found = module(folder, "a", "bb"), {"a": [], "bb": []}  # type: ignore[var-annotated]
    for step in range(3):
        for part in range(2):
            for name, losses in found.items():
                seed = len(name) + 10 * step + part
                losses.append(both.requested_pass(batch(seed), CROSS, name, backward=True)["loss"])
                both.requested_pass(batch(99), CROSS, name, backward=False)
        for name in found:
            both.requested_step(ADAM, name)
    assert found == alone


def test_a_whole_model_is_trained_too(folder: Path) -> None:
    made = module(folder)
    losses = train(made, None, 1, 1)
    assert train(made, None, 1, 1)[0] < losses[0]


@pytest.mark.parametrize("several", [0, 3])
def test_targets_may_be_any_tokens(folder: Path, several: int) -> None:
    made, given = module(folder, "a"), batch(5, several=several)
    found = made.requested_pass(given, CROSS, "a", backward=True)
    with torch.no_grad(), made.using("a"):
        log_p = made(input_ids=given["input_ids"][:, :-1]).logits.log_softmax(-1)
    targets = given["targets"] if several else given["targets"].unsqueeze(2)
    mask = given["mask"].unsqueeze(2)
    wanted = log_p.gather(2, targets) * mask
    assert torch.allclose(found["log_probs"].view_as(wanted), wanted, atol=1e-5)
    weights = given["weights"].view_as(wanted)
    assert found["loss"] == pytest.approx(float(-(wanted * weights).sum()), rel=1e-5)
    scored = made.requested_scores(given, 2, "a")
    assert torch.allclose(scored["log_probs"].view_as(wanted) * mask, wanted, atol=1e-5)
    best = log_p.topk(2).values * mask
    assert torch.allclose(scored["best"] * mask, best, atol=1e-5)


def test_what_needs_the_same_runs_together_and_others_wait_for_a_turn() -> None:
    changes: list[str] = []
    turns: Turns[str, int] = Turns(changes.append)
    names = ("a1", "b", "a2", "a3")
    begun = {name: Event() for name in names}
    ends: dict[str, Future[int]] = {name: Future() for name in names}

    def ask(name: str) -> "Future[int]":
        def begin() -> "Future[int]":
            begun[name].set()
            return ends[name]

        return turns.ask(name[0], begin)

    first = ask("a1")
    assert begun["a1"].wait(WAIT_S)
    other, second, third = ask("b"), ask("a2"), ask("a3")
    assert not begun["b"].is_set()
    ends["a1"].set_result(1)
    assert first.result(WAIT_S) == 1
    assert begun["b"].wait(WAIT_S)
    assert not begun["a2"].is_set()  # it was asked for later, and would need another change
    ends["b"].set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        other.result(WAIT_S)
    assert begun["a2"].wait(WAIT_S)
    assert begun["a3"].wait(WAIT_S)  # beside the other
    for number, name in enumerate(("a2", "a3")):
        ends[name].set_result(number)
    assert [second.result(WAIT_S), third.result(WAIT_S)] == [0, 1]
    assert changes == ["a", "b", "a"]

    def broken(_: str) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        Turns[str, int](broken).ask("a", lambda: ends["b"]).result(WAIT_S)
    turns.close()


def test_a_step_uses_the_numbers_that_it_is_given(folder: Path) -> None:
    made = module(folder, "a")
    made.requested_pass(batch(1), CROSS, "a", backward=True)
    before = [p.detach().clone() for p in made.adapter_optimizers["a"].param_groups[0]["params"]]
    clipped = AdamStep(0.0, 0.5, 0.6, 1e-8, 0.1, 1e-3)
    metrics = made.requested_step(clipped, "a")
    group = made.adapter_optimizers["a"].param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-8, 0.1)
    assert metrics["learning_rate"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, group["params"], strict=True))
