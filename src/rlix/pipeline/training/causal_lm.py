"""Scores of tokens under a causal language model, without its logits where its head allows it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlix.pipeline.algorithms.tensors import Scores, entropy, token_log_probs
from rlix.pipeline.training.adapters import AdaptedModule
from rlix.pipeline.training.micro_batches import in_place
from rlix.pipeline.training.token_scores import chosen_scores

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 8


class CausalLmModule(AdaptedModule):
    """Mixed in before a transformers causal LM class."""

    def scores(self, part: Mapping[str, Tensor], temperature: float = 1.0) -> Scores:
        """Of the tokens that a micro-batch's mask counts; differentiable."""
        inputs = self.inputs(part)
        mask = part["mask"].bool()
        tokens = part["input_ids"][:, 1:][mask]
        if self._head_gives_logits():
            # The head is called where the model calls it, inside its forward pass: there FSDP has gathered its weight.
            with _answering(self._head(), inputs.predictions, tokens, temperature):
                log_probs, entropies = self._model(**inputs.tensors, use_cache=False).logits
        else:
            logits = self._model(**inputs.tensors, use_cache=False).logits
            chosen = logits.flatten(0, 1)[inputs.predictions].unsqueeze(0)
            log_probs = token_log_probs(chosen, tokens.unsqueeze(0), temperature=temperature)[0]
            entropies = entropy(chosen, temperature=temperature)[0]
        return Scores(in_place(log_probs, mask), in_place(entropies, mask))

    def _head(self) -> Any:
        return self._model.get_output_embeddings()

    def _head_gives_logits(self) -> bool:
        """Whether the logits are what a linear head makes of the hidden states, and nothing comes after it.

        The model is asked once, with tokens that are the same on every rank: some models cap or scale what the head
        gives, and others have a head with adapters or none.
        """
        known: bool | None = getattr(self, "_plain_head", None)
        if known is None:
            known = type(head := self._head()) is nn.Linear and self._nothing_follows(head)
            if not known:
                logger.warning(
                    "%s does not end in a plain linear head: the logits of a whole micro-batch are kept in memory; "
                    "lower training.micro_batch_tokens if it runs out",
                    type(self).__name__,
                )
            self._plain_head = known
        return known

    @torch.no_grad()
    def _nothing_follows(self, head: nn.Linear) -> bool:
        given: list[Tensor] = []
        hook = head.register_forward_hook(lambda _module, _args, output: given.append(output))
        ids = torch.arange(_PROBE_TOKENS, device=self.device).unsqueeze(0) % head.out_features
        try:
            with self.own_random_numbers():  # or the first step of all would draw others than it does later
                logits = self._model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        return len(given) == 1 and torch.equal(given[0].float(), logits.float())


@contextmanager
def _answering(head: Any, predictions: Tensor, tokens: Tensor, temperature: float) -> Iterator[None]:
    """Let the head return log-probs and entropies of `tokens` [2, n] in place of logits."""

    def forward(hidden: Tensor) -> Tensor:
        chosen = hidden.flatten(0, 1)[predictions]
        return torch.stack(chosen_scores(chosen, head.weight, head.bias, tokens, temperature=temperature))

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
