"""The policy as a train module: what each rank computes, written as for one process."""

from pathlib import Path
from typing import Any, NotRequired, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlix.nn import HuggingFaceFsdp2TrainModule, configures, returns
from rlix.pipeline.algorithms import clipped_policy_loss, kl_estimate, token_log_probs
from rlix.pipeline.algorithms.tensors import aggregate
from rlix.pipeline.batch import TokenBatch
from rlix.pipeline.spec.training import AlgorithmSpec, OptimizerSpec


class PolicyBatch(TokenBatch):
    """Sequences with what the policy loss needs, each [batch, length - 1]; `advantages` may be [batch].

    `behavior_log_probs` and `versions`: of the policy that sampled the tokens; `importance`: each token's weight in the
    loss.
    """

    advantages: NotRequired[Tensor]
    behavior_log_probs: NotRequired[Tensor]
    importance: NotRequired[Tensor]
    old_log_probs: NotRequired[Tensor]
    reference_log_probs: NotRequired[Tensor]
    versions: NotRequired[Tensor]


class OptimizedModule(HuggingFaceFsdp2TrainModule):
    """With an AdamW that is configured once the weights are there."""

    optimizer: torch.optim.Optimizer

    @configures
    def configure_optimizer(self, spec: OptimizerSpec) -> None:
        self.optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=spec.learning_rate,
            betas=spec.betas,
            weight_decay=spec.weight_decay,
            foreach=False,  # the fused multi-tensor path refuses parameters sharded over different meshes
        )


class PolicyModule(OptimizedModule):
    """Mixed into a causal LM class by `policy_class`. Batches arrive split: a rank sees its share of the rows.

    `tokens` arguments are counts over the global batch, so that every token weighs the same on every layout.
    """

    @returns("sum")
    def supervised_step(self, batch: TokenBatch, tokens: float, learning_rate: float, max_grad_norm: float) -> float:
        """One step on right answers at its own learning rate; returns this rank's part of the mean loss per token."""
        optimizer = self._warmup_optimizer(learning_rate)
        losses = -self._token_log_probs(batch)
        mask = batch["mask"].to(self.device)
        loss = self.global_mean(losses, mask, total=tokens)
        loss.backward()
        self.clip_grad_norm(max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()) / self.dp_size

    def finish_warmup(self) -> None:
        """Forget the warm-up's optimizer: its moments belong to another loss."""
        del self._warmup

    @torch.no_grad()
    def log_probs(self, batch: TokenBatch, temperature: float) -> Tensor:
        """Log-probability of each next token: [batch, length - 1], float32, on the CPU."""
        return self._token_log_probs(batch, temperature).cpu()

    @returns("sum")
    def policy_step(
        self, batch: PolicyBatch, tokens: float, algorithm: AlgorithmSpec, temperature: float, max_grad_norm: float
    ) -> dict[str, float]:
        """One optimizer step on a minibatch; returns this rank's part of each metric's global value."""
        log_probs = self._token_log_probs(batch, temperature)
        mask = batch["mask"].to(self.device)
        old, importance = batch.get("old_log_probs"), batch.get("importance")
        rows = float(self.dp_sum(mask.any(dim=1).sum()))
        denominator = (tokens if algorithm.aggregation == "token" else rows) / self.dp_size
        result = clipped_policy_loss(
            log_probs,
            log_probs.detach() if old is None else old.to(self.device),
            batch["advantages"].to(self.device),
            mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            aggregation=algorithm.aggregation,
            denominator=denominator,
            weights=None if importance is None else importance.to(self.device),
        )
        loss = result.loss
        metrics = {"clip_fraction": result.clip_fraction / self.dp_size, "approx_kl": result.approx_kl / self.dp_size}
        reference = None if algorithm.kl_in_reward else batch.get("reference_log_probs")
        if reference is not None:
            kl = aggregate(
                kl_estimate(log_probs, reference.to(self.device), algorithm.kl_estimator),
                mask,
                algorithm.aggregation,
                denominator,
            )
            loss = loss + algorithm.kl_coefficient * kl
            metrics["kl"] = kl.detach() / self.dp_size
        loss.backward()
        norm = self.clip_grad_norm(max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        metrics |= {"loss": loss.detach() / self.dp_size, "grad_norm": norm / self.dp_size}
        return {name: float(value) for name, value in metrics.items()}

    def _token_log_probs(self, batch: TokenBatch, temperature: float = 1.0) -> Tensor:
        input_ids = batch["input_ids"].to(self.device)
        logits = self(input_ids=input_ids, use_cache=False).logits[:, :-1]
        return token_log_probs(logits, input_ids[:, 1:], temperature=temperature)

    def _warmup_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        if not hasattr(self, "_warmup"):
            self._warmup = torch.optim.AdamW(
                self.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False
            )
        return self._warmup


def policy_on_meta(path: Path) -> PolicyModule:
    """The policy of a local Hugging Face causal LM folder, without weights."""
    config = AutoConfig.from_pretrained(path)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        return cast(PolicyModule, policy_class(model_class)(config))


def policy_class(model_class: type) -> type[Any]:
    """`model_class` with the methods of `PolicyModule`."""
    return type(f"Policy{model_class.__name__}", (PolicyModule, model_class), {})
