"""Every algorithm's update twice: as rlix computes it, and as `plain_training` writes it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2ForCausalLM

from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.pipeline.algorithms import Algorithm
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.samples import Samples
from rlix.pipeline.spec.algorithm import AlgorithmSpec
from rlix.pipeline.training.critic import CriticModule, critic_on_meta
from rlix.pipeline.training.policy import PolicyModule, policy_on_meta
from tests.pipeline import plain_training as plain
from tests.pipeline.plain_samples import samples_of
from tests.pipeline.plain_training import Batch

TEMPERATURE = 0.9
KL = 0.1
CLIP = 0.2
CAP = 1.1
LONGEST = 13
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo", "reinforce_pp", "ppo")

Gradients = dict[str, Tensor]


class Recording:
    """In place of an optimizer step: the whole gradients are kept."""

    def update(self, metrics: Mapping[str, float], max_grad_norm: float, optimizer: Any = None) -> dict[str, float]:
        self.recorded = {name: _whole(p.grad) for name, p in self.named_parameters()}
        self.zero_grad()
        return dict(metrics)

    def gradients(self) -> Gradients:
        return self.recorded


def recording(module: Any) -> Any:
    """The class of a module on meta that records instead of stepping, and what it is built from."""
    kind = type(module)
    mixed = type(f"Recording{kind.__name__}", (Recording, kind), {})
    with torch.device("meta"):
        return mixed(*module.rlix_init[0], **module.rlix_init[1])


def built(meta: Any, folder: Path) -> Any:
    args, kwargs = meta.rlix_init
    spec = ModuleSpec(module_class=type(meta), args=args, kwargs=kwargs, weights_path=str(folder))
    return build_module(spec, torch.device("cpu"), None)


def policy(folder: Path) -> PolicyModule:
    return recording(policy_on_meta(folder))


def critic(folder: Path) -> CriticModule:
    return recording(critic_on_meta(folder))


@dataclass(frozen=True)
class Scenario:
    """`tensors` of the batch as rlix gets it, and the plain loss of the log-probs."""

    algorithm: Algorithm
    tensors: dict[str, Tensor]
    loss: Callable[[Tensor], Tensor]

    @property
    def denominator(self) -> float:
        return self.algorithm.denominator(self.tensors["mask"])


def scenario(name: str, batch: Batch, aggregation: Any = "token") -> Scenario:
    """`aggregation` is that of the algorithms that have a choice."""
    options: dict[str, Any] = {"kl_coefficient": KL}
    if name not in ("dr_grpo", "gspo", "cispo"):
        options |= {"aggregation": aggregation, "clip_low": CLIP}
    options |= {"reinforce_pp": {"discount": 0.9}, "ppo": {"discount": 0.9}, "cispo": {"ratio_cap": CAP}}.get(name, {})
    algorithm = build_algorithm(AlgorithmSpec(name=name, options=options), LONGEST)
    tensors = {
        "input_ids": batch.ids,
        "mask": batch.mask,
        "old_log_probs": batch.old,
        "reference_log_probs": batch.reference,
        "values": batch.old_values,
        "importance": batch.importance,
    }
    tensors["advantages"] = algorithm.estimate(of(batch), cast(PolicyBatch, tensors)).advantages
    del tensors["values"]
    return Scenario(algorithm, tensors, plain_loss(name, batch, aggregation))


def of(batch: Batch) -> Samples:
    """The rows as samples of one turn."""
    lengths = [total - prompt for prompt, total in zip(batch.prompts, batch.totals, strict=True)]
    return samples_of(batch.rewards.tolist(), plain.GROUP, tokens=lengths)


def plain_loss(name: str, batch: Batch, aggregation: str) -> Callable[[Tensor], Tensor]:
    if name == "dr_grpo":
        advantages = plain.group_advantages(batch.rewards, by_std=False)
        return lambda log_probs: plain.dr_grpo_loss(
            log_probs, batch, advantages, clip=0.2, longest=LONGEST, kl_coefficient=KL
        )
    grouped = plain.group_advantages(batch.rewards)
    if name == "gspo":
        return lambda log_probs: plain.gspo_loss(log_probs, batch, grouped, low=3e-4, high=4e-4, kl_coefficient=KL)
    if name == "cispo":
        return lambda log_probs: plain.cispo_loss(log_probs, batch, grouped, cap=CAP, kl_coefficient=KL)
    if name == "rloo":
        grouped = plain.group_advantages(plain.rewards_less_kl(batch, KL), leave_one_out=True)
    elif name == "reinforce_pp":
        grouped = plain.normalised(plain.discounted_returns(batch, KL, 0.9), batch.mask)
    elif name == "ppo":
        grouped = plain.normalised(plain.generalised_advantages(batch, KL, 0.9, 0.95), batch.mask)
    return lambda log_probs: plain.policy_loss(
        log_probs,
        batch,
        grouped,
        low=CLIP,
        high=0.28 if name == "dapo" else 0.2,
        aggregation=aggregation,
        kl_coefficient=0.0 if name in ("rloo", "reinforce_pp", "ppo") else KL,
    )


def critic_tensors(batch: Batch) -> dict[str, Tensor]:
    """What the critic of ppo learns from."""
    given = {
        "mask": batch.mask,
        "old_log_probs": batch.old,
        "reference_log_probs": batch.reference,
        "values": batch.old_values,
    }
    estimate = scenario("ppo", batch).algorithm.estimate(of(batch), cast(PolicyBatch, given))
    assert estimate.returns is not None
    kept = {"input_ids": batch.ids, "mask": batch.mask, "old_values": batch.old_values}
    return {**kept, "returns": estimate.returns}


def expected_policy(folder: Path, batch: Batch, scenario: Scenario) -> tuple[float, Gradients]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    loss = scenario.loss(plain.token_log_probs(model, batch.ids, TEMPERATURE))
    return _backward(model, loss)


def expected_critic(folder: Path, batch: Batch, head: Tensor, aggregation: Any) -> tuple[float, Gradients]:
    config = AutoConfig.from_pretrained(folder, num_labels=1, classifier_dropout=0.0, attn_implementation="eager")
    model = AutoModelForTokenClassification.from_pretrained(folder, config=config)
    with torch.no_grad():
        model.score.weight.copy_(head)
        model.score.bias.zero_()
    targets = (plain.generalised_advantages(batch, KL, 0.9, 0.95) + batch.old_values) * batch.mask
    values = model(input_ids=batch.ids).logits[:, :-1, 0]
    return _backward(model, plain.critic_loss(values, batch, targets, clip=CLIP, aggregation=aggregation))


def write_model(folder: Path, **changes: Any) -> Path:
    """A Qwen2 that has an opinion, as a Hugging Face folder."""
    from tests.engine.models import qwen

    torch.manual_seed(3)
    small = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.08}
    Qwen2ForCausalLM(qwen(**{**small, **changes})).save_pretrained(folder)
    return folder


def _backward(model: torch.nn.Module, loss: Tensor) -> tuple[float, Gradients]:
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _whole(grad: Any) -> Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


class Hangs:
    """An algorithm whose loss raises on rank 1 and returns on no other."""

    def loss(self, *_: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no loss here")
        time.sleep(600)
