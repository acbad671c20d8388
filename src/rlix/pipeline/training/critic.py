"""The critic as a train module: a value for every position, learnt beside the policy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForTokenClassification

from rlix.nn import returns
from rlix.pipeline.algorithms import masked_mean, value_loss
from rlix.pipeline.algorithms.tensors import Terms
from rlix.pipeline.batch import TokenBatch
from rlix.pipeline.training.metrics import TOKENS
from rlix.pipeline.training.micro_batches import in_place
from rlix.pipeline.training.module import OptimizedModule


class CriticBatch(TokenBatch):
    """`old_values` and `returns` [batch, length - 1]: the estimate before the update, and what it should have been."""

    old_values: Tensor
    returns: Tensor


class CriticModule(OptimizedModule):
    """Mixed into a token classification class with one label; a rank sees its share of a batch's rows."""

    allow_missing = ("score.*",)
    allow_unknown = ("lm_head.*",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's; not a view of what its head returns, of which FSDP warns at every job's start."""
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.clone()
        return output

    @torch.no_grad()
    def values(self, batch: TokenBatch) -> Tensor:
        """Estimated return before each token that the mask counts, 0 elsewhere: [batch, length - 1], on the CPU."""
        return self.gathered(cast(Mapping[str, Tensor], batch), self._values)

    @returns("sum")
    def critic_step(
        self, batch: CriticBatch, denominator: float, clip: float | None, aggregation: Any, max_grad_norm: float
    ) -> dict[str, float]:
        """One optimizer step on a minibatch, whose losses add up to a sum over `denominator`.

        Returns this rank's part of each metric's global value.
        """

        def loss_of(part: Mapping[str, Tensor]) -> Terms:
            values, mask = self._values(part), part["mask"]
            loss = value_loss(
                values,
                part["old_values"],
                part["returns"],
                mask,
                clip=clip,
                aggregation=aggregation,
                denominator=denominator / self.dp_size,
            )
            return loss, {"error": masked_mean((values.detach() - part["returns"]).abs(), mask)}

        metrics = self.update(self.accumulate(cast(Mapping[str, Tensor], batch), loss_of), max_grad_norm)
        return {name if name == TOKENS else f"value_{name}": value for name, value in metrics.items()}

    def _values(self, part: Mapping[str, Tensor]) -> Tensor:
        inputs = self.inputs(part)
        logits = self._model(**inputs.tensors, use_cache=False).logits
        return in_place(logits.flatten(0, 1)[inputs.predictions, 0].float(), part["mask"])


def critic_on_meta(path: Path) -> CriticModule:
    """A critic on the trunk of a local Hugging Face causal LM folder, without weights; its head starts anew."""
    config = AutoConfig.from_pretrained(path, num_labels=1, classifier_dropout=0.0)
    model_class = AutoModelForTokenClassification._model_mapping[type(config)]
    mixed = type(f"Critic{model_class.__name__}", (CriticModule, model_class), {})
    with torch.device("meta"):
        return cast(CriticModule, mixed(config))
