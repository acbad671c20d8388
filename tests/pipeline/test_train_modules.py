"""What one rank computes, against plain PyTorch: every loss, in one pass and in micro-batches, padded and packed."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import Gemma2Config, Gemma2ForCausalLM

from rlix.pipeline.spec.training import OptimizerSpec, TrainingSpec
from rlix.pipeline.training.critic import critic_on_meta
from rlix.pipeline.training.policy import PolicyModule, policy_on_meta
from rlix.pipeline.training.schedule import learning_rate_factor
from tests.pipeline import plain_training as plain
from tests.pipeline.training_scenarios import (
    ALGORITHMS,
    CLIP,
    TEMPERATURE,
    Gradients,
    built,
    critic,
    critic_tensors,
    expected_critic,
    expected_policy,
    policy,
    scenario,
    write_model,
)

BATCH = plain.random_batch()
TOKENS = float(BATCH.mask.sum())
ROWS = float(len(BATCH.ids))
CASES = [(name, "token") for name in ALGORITHMS] + [(name, "sequence") for name in ("grpo", "rloo", "ppo")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tied_not")


def same(ours: Gradients, theirs: Gradients) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert_close(ours[name], grad, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "training", [{}, {"micro_batch_tokens": 20}, {"micro_batch_tokens": 30, "packing": True}], ids=str
)
@pytest.mark.parametrize(("name", "aggregation"), CASES)
def test_policy_losses_and_gradients(name: str, aggregation: str, training: dict[str, Any], folder: Path) -> None:
    module = built(policy(folder), folder)
    module.configure_optimizer(OptimizerSpec(), TrainingSpec(**training))
    wanted = scenario(name, BATCH, aggregation)
    metrics = module.policy_step(wanted.tensors, wanted.denominator, wanted.algorithm, TEMPERATURE, 1.0)
    loss, gradients = expected_policy(folder, BATCH, wanted)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    same(module.gradients(), gradients)


@pytest.mark.parametrize(
    "training", [{}, {"micro_batch_tokens": 20}, {"micro_batch_tokens": 30, "packing": True}], ids=str
)
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_critics_loss_and_gradients(aggregation: str, training: dict[str, Any], folder: Path) -> None:
    module: Any = built(critic(folder), folder)
    module.configure_optimizer(OptimizerSpec(), TrainingSpec(**training))
    head = module.score.weight.detach().clone()
    metrics = module.critic_step(
        critic_tensors(BATCH), TOKENS if aggregation == "token" else ROWS, CLIP, aggregation, 1.0
    )
    loss, gradients = expected_critic(folder, BATCH, head, aggregation)
    assert metrics["value_loss"] == pytest.approx(loss, abs=1e-6)
    same(module.gradients(), gradients)


def test_the_critic_returns_no_view_of_which_fsdp_would_warn(folder: Path) -> None:
    assert not built(critic_on_meta(folder), folder)(input_ids=BATCH.ids).logits._is_view()


@pytest.mark.parametrize("packing", [False, True])
def test_log_probs_are_those_of_one_pass_over_all(packing: bool, folder: Path) -> None:
    module = built(policy_on_meta(folder), folder)
    module.configure_optimizer(OptimizerSpec(), TrainingSpec(micro_batch_tokens=25, packing=packing))
    given = module.log_probs({"input_ids": BATCH.ids, "mask": BATCH.mask}, TEMPERATURE)
    with torch.no_grad():
        expected = plain.token_log_probs(module, BATCH.ids, TEMPERATURE) * BATCH.mask
    assert_close(given, expected, atol=1e-5, rtol=1e-5)


def stepped(folder: Path, optimizer: OptimizerSpec | None = None, **training: Any) -> PolicyModule:
    module: Any = built(policy_on_meta(folder), folder)
    module.configure_optimizer(optimizer or OptimizerSpec(learning_rate=1e-3), TrainingSpec(**training), 10)
    return module


def step(module: Any, wanted: Any = None) -> dict[str, float]:
    wanted = wanted or scenario("grpo", BATCH)
    return module.policy_step(wanted.tensors, wanted.denominator, wanted.algorithm, TEMPERATURE, 1.0)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])  # with a KL in the loss, and in the reward
def test_metrics_are_means_over_all_tokens(algorithm: str, folder: Path) -> None:
    wanted = scenario(algorithm, BATCH)
    whole, parts = step(stepped(folder), wanted), step(stepped(folder, micro_batch_tokens=20), wanted)
    assert set(whole) == {
        *("loss", "kl", "approx_kl", "clip_fraction", "entropy"),
        *("grad_norm", "learning_rate", "skipped_updates", "update_tokens"),
    }
    assert parts == pytest.approx(whole, abs=1e-5)
    model: Any = built(policy_on_meta(folder), folder)
    distribution = (model(input_ids=BATCH.ids).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    assert whole["entropy"] == pytest.approx(entropies[BATCH.mask.bool()].mean().item(), abs=1e-5)
    kl = plain.reference_kl(plain.token_log_probs(model, BATCH.ids, TEMPERATURE), BATCH)
    assert whole["kl"] == pytest.approx(kl[BATCH.mask.bool()].mean().item(), abs=1e-5)


def test_activation_checkpointing_changes_nothing_but_what_is_kept(folder: Path) -> None:
    def kept(module: Any) -> tuple[dict[str, float], int]:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            return step(module), sum(sizes)

    plainly, all_bytes = kept(stepped(folder))
    again, fewer = kept(stepped(folder, activation_checkpointing=True))
    assert again == plainly
    assert fewer < 0.5 * all_bytes


@pytest.mark.parametrize("packing", [False, True])
def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_batch(packing: bool, folder: Path) -> None:
    def kept(rows: int, budget: int) -> int:
        """The most bytes that one micro-batch keeps."""
        module: Any = stepped(folder, micro_batch_tokens=budget, packing=packing)
        sizes: list[int] = []
        module.sync_gradients = lambda last: sizes.append(0)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes[-1] += tensor.nbytes
            return tensor

        batch = plain.random_batch(rows)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step(module, scenario("grpo", batch))
        return max(sizes)

    small, large = kept(16, 60), kept(128, 60)
    assert large < 1.1 * small
    assert kept(128, 10**6) > 4 * large


def test_dropout_is_off_unless_asked_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "dropout", attention_dropout=0.5)
    alone = step(stepped(folder))
    assert step(stepped(folder)) == alone
    dropping = stepped(folder, dropout=True)
    assert step(dropping)["loss"] != alone["loss"]
    tokens = {"input_ids": BATCH.ids, "mask": BATCH.mask}
    assert torch.equal(dropping.log_probs(tokens, 1.0), dropping.log_probs(tokens, 1.0))


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_said(folder: Path, caplog: Any) -> None:
    module: Any = stepped(folder)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    wanted = scenario("grpo", BATCH)
    broken = {**wanted.tensors, "advantages": wanted.tensors["advantages"] * float("inf")}
    with caplog.at_level(logging.WARNING):
        metrics = module.policy_step(broken, wanted.denominator, wanted.algorithm, TEMPERATURE, 1.0)
    assert metrics == {"skipped_updates": 1.0}
    assert "optimizer step left out (1 so far)" in caplog.text
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert step(module) == step(stepped(folder))


def test_the_learning_rate_of_each_update(folder: Path) -> None:
    optimizer = OptimizerSpec(learning_rate=1e-3, schedule="linear", warmup_updates=2, final_learning_rate=0.2)
    module = stepped(folder, optimizer)
    rates = [step(module)["learning_rate"] for _ in range(11)]
    expected = [0.5, 1.0, *(1 - 0.8 * k / 8 for k in range(9))]
    assert rates == pytest.approx([1e-3 * factor for factor in expected])


def test_schedules() -> None:
    cosine = learning_rate_factor(OptimizerSpec(schedule="cosine", final_learning_rate=0.1), 10)
    assert [cosine(k) for k in (0, 5, 10, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    constant = learning_rate_factor(OptimizerSpec(warmup_updates=4), 10)
    assert [constant(k) for k in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_tied_embeddings_get_the_gradients_of_both_uses(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tied", tie_word_embeddings=True)
    module = built(policy(folder), folder)
    wanted = scenario("grpo", BATCH)
    module.policy_step(wanted.tensors, wanted.denominator, wanted.algorithm, TEMPERATURE, 1.0)
    same(module.gradients(), expected_policy(folder, BATCH, wanted)[1])


def test_a_model_that_changes_its_heads_logits_is_scored_by_whole_logits_and_says_so(
    tmp_path: Path, caplog: Any
) -> None:
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.5,
        attn_logit_softcapping=None,  # which sdpa would leave out
        initializer_range=0.3,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    module = built(policy(tmp_path), tmp_path)
    wanted = scenario("grpo", BATCH)
    with caplog.at_level(logging.WARNING):
        metrics = module.policy_step(wanted.tensors, wanted.denominator, wanted.algorithm, TEMPERATURE, 1.0)
    assert "does not end in a plain linear head" in caplog.text
    loss, gradients = expected_policy(tmp_path, BATCH, wanted)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    same(module.gradients(), gradients)


def test_a_minibatch_that_counts_for_nothing_on_this_rank(folder: Path) -> None:
    module = stepped(folder)
    wanted = scenario("grpo", BATCH)
    empty = {**wanted.tensors, "mask": torch.zeros_like(BATCH.mask)}
    metrics = module.policy_step(empty, wanted.denominator, wanted.algorithm, TEMPERATURE, 1.0)
    assert metrics["loss"] == metrics["grad_norm"] == 0.0
