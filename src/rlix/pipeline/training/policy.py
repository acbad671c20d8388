"""The policy as a train module: what each rank computes, written as for one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlix.nn import returns
from rlix.pipeline.algorithms.base import Algorithm
from rlix.pipeline.algorithms.losses import mismatch
from rlix.pipeline.algorithms.tensors import Terms, masked_mean
from rlix.pipeline.batch import PolicyBatch, TokenBatch
from rlix.pipeline.spec.training import OptimizerSpec
from rlix.pipeline.training.causal_lm import CausalLmModule


class PolicyModule(CausalLmModule):
    """Mixed into a causal LM class by `policy_class`. Batches arrive split: a rank sees its share of the rows.

    `tokens` and `denominator` are those of the global batch, so that every token weighs the same on every layout, in
    every micro-batch.
    """

    @returns("sum")
    def supervised_step(self, batch: TokenBatch, tokens: float, learning_rate: float, max_grad_norm: float) -> float:
        """One step on right answers at its own learning rate; returns this rank's part of the mean loss per token."""
        optimizer = self._warmup_optimizer(learning_rate)

        def loss_of(part: Mapping[str, Tensor]) -> Terms:
            return self.global_mean(-self.scores(part).log_probs, part["mask"], total=tokens), {}

        sums = self.accumulate(_tensors(batch), loss_of)
        self.update({}, max_grad_norm, optimizer)
        return sums["loss"]

    def finish_warmup(self) -> None:
        """Forget the warm-up's optimizer: its moments belong to another loss."""
        del self._warmup

    @torch.no_grad()
    def log_probs(self, batch: TokenBatch, temperature: float, adapter: str | None = None) -> Tensor:
        """Log-probability of each next token that the mask counts, 0 elsewhere: [batch, length - 1], on the CPU."""
        with self.using(adapter):
            return self.gathered(_tensors(batch), lambda part: self.scores(part, temperature).log_probs)

    @returns("sum")
    def policy_step(
        self,
        batch: PolicyBatch,
        denominator: float,
        algorithm: Algorithm,
        temperature: float,
        max_grad_norm: float,
        adapter: str | None = None,
    ) -> dict[str, float]:
        """One optimizer step on a minibatch, whose losses add up to a sum over `denominator`; of `adapter` alone.

        Returns this rank's part of each metric's global value.
        """

        def loss_of(part: Mapping[str, Tensor]) -> Terms:
            scores = self.scores(part, temperature)
            loss, metrics = algorithm.loss(scores, cast(PolicyBatch, part), denominator / self.dp_size)
            more = {"entropy": masked_mean(scores.entropies, part["mask"])}
            if (sampled := part.get("sampled_log_probs")) is not None:
                more |= mismatch(scores.log_probs, sampled, part["mask"])
            return loss, {**metrics, **more}

        with self.using(adapter):
            return self.update(self.accumulate(_tensors(batch), loss_of), max_grad_norm)

    def _warmup_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        if not hasattr(self, "_warmup"):
            self._warmup = self.new_optimizer(OptimizerSpec(learning_rate=learning_rate))
        return self._warmup


def policy_on_meta(path: Path, mixin: type[PolicyModule] = PolicyModule) -> PolicyModule:
    """The policy of a local Hugging Face causal LM folder, without weights; with the methods of `mixin`."""
    config = AutoConfig.from_pretrained(path)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        return cast(PolicyModule, policy_class(model_class, mixin)(config))


def policy_class(model_class: type, mixin: type[PolicyModule] = PolicyModule) -> type[Any]:
    """`model_class` with the methods of `mixin`."""
    return type(f"Policy{model_class.__name__}", (mixin, model_class), {})


def _tensors(batch: TokenBatch) -> Mapping[str, Tensor]:
    return cast(Mapping[str, Tensor], batch)
