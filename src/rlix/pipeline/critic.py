"""The critic as a train module: a value for every position, learnt beside the policy."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForTokenClassification

from rlix.nn import returns
from rlix.pipeline.algorithms import masked_mean, value_loss
from rlix.pipeline.batch import TokenBatch
from rlix.pipeline.policy import OptimizedModule


class CriticBatch(TokenBatch):
    """`old_values` and `returns` [batch, length - 1]: the estimate before the update, and what it should have been."""

    old_values: Tensor
    returns: Tensor


class CriticModule(OptimizedModule):
    """Mixed into a token classification class with one label; a rank sees its share of a batch's rows."""

    allow_missing = ("score.*",)
    allow_unknown = ("lm_head.*",)

    @torch.no_grad()
    def values(self, batch: TokenBatch) -> Tensor:
        """Estimated return before each next token: [batch, length - 1], float32, on the CPU."""
        return self._values(batch).cpu()

    @returns("sum")
    def critic_step(
        self, batch: CriticBatch, denominator: float, clip: float | None, aggregation: Any, max_grad_norm: float
    ) -> dict[str, float]:
        """One optimizer step on a minibatch, whose losses add up to a sum over `denominator`.

        Returns this rank's part of each metric's global value.
        """
        values, mask = self._values(batch), batch["mask"].to(self.device)
        target = batch["returns"].to(self.device)
        loss = value_loss(
            values,
            batch["old_values"].to(self.device),
            target,
            mask,
            clip=clip,
            aggregation=aggregation,
            denominator=denominator / self.dp_size,
        )
        loss.backward()
        norm = self.clip_grad_norm(max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        metrics = {
            "value_loss": loss.detach(),
            "value_grad_norm": norm,
            "value_error": masked_mean((values.detach() - target).abs(), mask),
        }
        return {name: float(value) / self.dp_size for name, value in metrics.items()}

    def _values(self, batch: TokenBatch) -> Tensor:
        logits = self(input_ids=batch["input_ids"].to(self.device), use_cache=False).logits
        return logits[:, :-1, 0].float()


def critic_on_meta(path: Path) -> CriticModule:
    """A critic on the trunk of a local Hugging Face causal LM folder, without weights; its head starts anew."""
    config = AutoConfig.from_pretrained(path, num_labels=1, classifier_dropout=0.0)
    model_class = AutoModelForTokenClassification._model_mapping[type(config)]
    mixed = type(f"Critic{model_class.__name__}", (CriticModule, model_class), {})
    with torch.device("meta"):
        return cast(CriticModule, mixed(config))
