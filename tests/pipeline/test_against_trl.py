"""The algorithms against TRL's own code, run on one process with the built-in model, random numbers and a fixed seed.

TRL 1.16 has no PPO trainer and no GAE; the clipped loss of its GRPO is PPO's, and stands for both here.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlix.pipeline.algorithms import (
    Scores,
    clipped_policy_loss,
    entropy,
    importance_weights,
    token_log_probs,
)
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.spec.algorithm import AlgorithmSpec
from rlix.pipeline.spec.model import TinyModel
from rlix.pipeline.tokenizer import load_tokenizer
from tests.pipeline.plain_samples import samples_of

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "vllm", None)  # which TRL would import, for seconds and for nothing
    import trl

    TRAINERS = {"GRPO": (trl.GRPOConfig, trl.GRPOTrainer), "RLOO": (trl.RLOOConfig, trl.RLOOTrainer)}

GROUP, ROWS = 4, 8
REWARDS = [0.0, 1.0, 0.25, 0.5, 1.0, 1.0, 1.0, 1.0]  # the second group has no spread
SAMPLES = samples_of(REWARDS, GROUP)
TRL_EPSILON = 1e-4  # which TRL adds to the standard deviation; ours leaves it out


def make_trainer(name: str, folder: Path, rewards: Sequence[Sequence[float]] = (REWARDS,), **options: Any) -> Any:
    """A trainer of TRL with one batch behind it: its samples are those of `inputs_of`."""
    torch.manual_seed(0)
    config, trainer = TRAINERS[name]
    made = trainer(
        model=str(folder),
        reward_funcs=[lambda completions, given=given, **_: given for given in rewards],
        args=config(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=ROWS,
            num_generations=GROUP,
            max_completion_length=6,
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_dropout=True,
            **options,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["12>", "34>"]}),
        processing_class=load_tokenizer(folder),
    )
    made.current_gradient_accumulation_steps = 1
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(TinyModel(), tmp_path_factory.mktemp("model"), seed=0)


def sampled(trainer: Any) -> dict[str, Any]:
    """A batch that TRL generated and scored, with the log-probs of policies that differ at random."""
    batch: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": p} for p in ["12>"] * 4 + ["34>"] * 4])
    source = torch.Generator().manual_seed(1)
    now = log_probs(trainer.model, batch).detach()
    noise = [torch.randn(now.shape, generator=source) for _ in range(3)]
    batch["old_per_token_logps"] = now + 0.3 * noise[0]
    batch["ref_per_token_logps"] = now + 0.3 * noise[1]
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + 0.5 * noise[2]
    batch["completion_mask"][0, 2:] = 0  # sequences of different lengths
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    return batch


def logits_of(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Of the completions under `model`."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return model(input_ids=ids, attention_mask=attended).logits[:, :-1][:, -batch["completion_ids"].shape[1] :]


def log_probs(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return token_log_probs(logits_of(model, batch), batch["completion_ids"])


def gradients(model: Any, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def close(ours: Tensor, theirs: Tensor) -> float:
    """How far apart they are at most."""
    assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    return float((ours - theirs).detach().abs().max())


def row(what: str, theirs: str, *differences: float) -> None:
    """Of the table in benchmarks/results/2026-11.md: run this file with -s."""
    sys.stdout.write(f"\n| {what} | {theirs} | {max(differences):.0e} |\n")


GDPO = Path(__file__).parents[2] / "examples" / "algorithms" / "gdpo.py"
KL = {"beta": 0.05, "use_bias_correction_kl": False}
SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2}


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("grpo", {"aggregation": "sequence"}, {"loss_type": "grpo"}),
        ("grpo", {"aggregation": "sequence", "kl_coefficient": 0.05}, {"loss_type": "grpo", **KL}),
        ("grpo", {"clip_high": 0.28, "kl_coefficient": 0.05}, {"loss_type": "bnpo", "epsilon_high": 0.28, **KL}),
        ("dapo", {"kl_coefficient": 0.05}, {"loss_type": "dapo", "epsilon_high": 0.28, **KL}),
        ("dr_grpo", {"kl_coefficient": 0.05}, {"loss_type": "dr_grpo", "scale_rewards": "none", **KL}),
        ("gspo", {"clip_low": 0.1, "clip_high": 0.2}, SEQUENCE),
        ("gspo", {"clip_low": 0.1, "clip_high": 0.2, "kl_coefficient": 0.05}, {**SEQUENCE, **KL}),
        ("grpo", {"dual_clip": 1.5}, {"loss_type": "bnpo", "delta": 1.5}),
        ("grpo", {"entropy_coefficient": 0.05}, {"loss_type": "bnpo", "entropy_coef": 0.05}),
        ("cispo", {"ratio_cap": 1.2, "kl_coefficient": 0.05}, {"loss_type": "cispo", "epsilon_high": 1.2, **KL}),
    ],
)
def test_losses_gradients_and_advantages(
    name: str, options: dict[str, Any], theirs: dict[str, Any], folder: Path
) -> None:
    trainer = make_trainer("GRPO", folder, **theirs)
    batch = sampled(trainer)
    algorithm = build_algorithm(AlgorithmSpec(name=name, options=options), 6)
    now, mask = log_probs(trainer.model, batch), batch["completion_mask"].float()
    scores = Scores(now, entropy(logits_of(trainer.model, batch)))
    ours = PolicyBatch(input_ids=batch["completion_ids"], mask=mask, old_log_probs=batch["old_per_token_logps"])
    if algorithm.needs(algorithm.options).reference:
        ours["reference_log_probs"] = batch["ref_per_token_logps"]

    rewards = torch.tensor(REWARDS)
    advantages = algorithm.estimate(SAMPLES, ours).advantages
    scaled = theirs.get("scale_rewards") != "none"
    spread = rewards.view(-1, GROUP).std(dim=1).repeat_interleave(GROUP)
    first = close(advantages * (spread / (spread + TRL_EPSILON) if scaled else 1.0), batch["advantages"])

    ours["advantages"] = batch["advantages"]
    loss = algorithm.loss(scores, ours, algorithm.denominator(mask))[0]
    expected = trainer._compute_loss(trainer.model, batch)
    found = close(loss, expected), close(gradients(trainer.model, loss), gradients(trainer.model, expected))
    said = " ".join(f"{key}={value}" for key, value in options.items())
    row(f"`{name}` {said}", f"TRL GRPO {theirs['loss_type']}", first, *found)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beyond", ["cut", "drop"])
def test_importance_weights(beyond: Any, level: Any, folder: Path) -> None:
    trainer = make_trainer("GRPO", folder, loss_type="bnpo")
    batch = sampled(trainer)
    now, old, mask = log_probs(trainer.model, batch), batch["old_per_token_logps"], batch["completion_mask"]
    cap, floor = 1.5, 0.6
    weights = importance_weights(
        old, batch["sampling_per_token_logps"], mask, cap=cap, floor=floor, level=level, beyond=beyond
    )
    assert float(weights.max()) == 1.5 if beyond == "cut" else 0.0 in weights
    # TRL's lines for `{level}_truncate` and `{level}_mask`, which only run with vLLM
    difference = (old - batch["sampling_per_token_logps"]) * mask
    ratio = torch.exp(difference.sum(dim=-1, keepdim=True) if level == "sequence" else difference)
    if beyond == "cut":
        ratio = torch.clamp(ratio, min=floor, max=cap)
    else:
        ratio = ratio.masked_fill((ratio < floor) | (ratio > cap), value=0.0)
    found = close(weights[mask.bool()], ratio.expand_as(weights)[mask.bool()])
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    theirs = trainer._compute_loss(trainer.model, batch | {"importance_sampling_ratio": ratio})
    loss = clipped_policy_loss(now, old, batch["advantages"], mask, weights=weights).loss
    row(f"importance by {level}, {beyond}", "TRL GRPO", found, close(loss, theirs))


def test_several_rewards_each_compared_by_itself(folder: Path) -> None:
    """The manual's GDPO against TRL's, which adds 1e-4 to each deviation and takes the unbiased one of the batch."""
    other = [0.0, 3.0, 1.0, 2.0, 5.0, 0.0, 1.0, 4.0]
    first = [0.0, 1.0, 0.25, 0.5, 1.0, 0.0, 1.0, 0.0]
    trainer = make_trainer(
        "GRPO", folder, rewards=[first, other], loss_type="bnpo", multi_objective_aggregation="normalize_then_sum"
    )
    theirs = trainer._generate_and_score_completions([{"prompt": p} for p in ["12>"] * 4 + ["34>"] * 4])["advantages"]
    plain = samples_of(first, GROUP)
    parts = [(("first", a), ("other", b)) for a, b in zip(first, other, strict=True)]
    samples = replace(plain, samples=[replace(s, parts=p) for s, p in zip(plain.samples, parts, strict=True)])
    algorithm = build_algorithm(AlgorithmSpec(name=f"{GDPO}:Gdpo"), 6)
    batch, _ = algorithm.begin(samples, 0)
    found = algorithm.estimate(samples, batch).advantages * ((ROWS - 1) / ROWS) ** 0.5
    assert_close(found, theirs, atol=1e-3, rtol=0)
    row("GDPO (above)", "TRL GRPO normalize_then_sum", float((found - theirs).abs().max()))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_leave_one_out(beta: float, folder: Path) -> None:
    """TRL's loss has one ratio for a sequence, ours one for a token: where old and new are equal the gradients are."""
    trainer = make_trainer("RLOO", folder, beta=beta)
    if trainer.ref_model is not None:
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    batch = trainer._generate_and_score_completions([{"prompt": p} for p in ["12>"] * 4 + ["34>"] * 4])
    now, mask = log_probs(trainer.model, batch), batch["completion_mask"].float()
    ours = PolicyBatch(input_ids=batch["completion_ids"], mask=mask, old_log_probs=now.detach())
    if beta:
        ours["reference_log_probs"] = log_probs(trainer.ref_model, batch).detach()
        assert not torch.allclose(now, ours["reference_log_probs"], atol=0.01)
    algorithm = build_algorithm(AlgorithmSpec(name="rloo", options={"kl_coefficient": beta}), 6)
    ours["advantages"] = algorithm.estimate(SAMPLES, ours).advantages
    close(ours["advantages"], batch["advantages"])
    batch["old_logps"] = (now * mask).sum(1).detach()
    loss = algorithm.loss(Scores(now, torch.zeros_like(now)), ours, float(ROWS))[0]
    expected = gradients(trainer.model, trainer._compute_loss(trainer.model, batch))
    row(f"`rloo` kl_coefficient={beta}", "TRL RLOO (gradient)", close(gradients(trainer.model, loss), expected))
