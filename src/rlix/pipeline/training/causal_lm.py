"""Scores of tokens under a causal language model, without its logits where its head allows it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlix.engine.train.sequence import Stretch
from rlix.pipeline.algorithms.tensors import Scores, entropy, token_log_probs
from rlix.pipeline.training.adapters import AdaptedModule
from rlix.pipeline.training.micro_batches import in_place
from rlix.pipeline.training.token_scores import chosen_scores

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 8


class CausalLmModule(AdaptedModule):
    """Mixed in before a transformers causal LM class."""

    def scores(self, part: Mapping[str, Tensor], temperature: float = 1.0) -> Scores:
        """Of the tokens that a micro-batch's mask counts; differentiable.

        They are those that follow, or the `targets` of the batch: [rows, length - 1], or [.., targets] for several.
        """
        inputs = self.inputs(part)
        mask, predictions = part["mask"].bool(), inputs.predictions
        tokens = part.get("targets", part["input_ids"][:, 1:])[mask]
        several = tokens.shape[1] if tokens.dim() == 2 else 0
        if several:
            predictions = predictions.repeat_interleave(several)
            tokens, mask = tokens.flatten(), mask.unsqueeze(2).expand(*mask.shape, several)
        if self._head_gives_logits() and not several:
            # The head is called where the model calls it, inside its forward pass: there FSDP has gathered its weight.
            length = inputs.tensors["input_ids"].shape[1]
            with _answering(self._head(), self._local(predictions, length), tokens, temperature):
                answers = self._model(**inputs.tensors, use_cache=False).logits
            log_probs, entropies = answers.flatten(0, 1)[predictions].unbind(1)
        else:
            logits = self._model(**inputs.tensors, use_cache=False).logits
            chosen = logits.flatten(0, 1)[predictions].unsqueeze(0)
            log_probs = token_log_probs(chosen, tokens.unsqueeze(0), temperature=temperature)[0]
            entropies = entropy(chosen, temperature=temperature)[0]
        return Scores(in_place(log_probs, mask), in_place(entropies, mask))

    def _local(self, predictions: Tensor, length: int) -> Tensor:
        """Where this rank's stretch has what flattened [rows x length] outputs have at `predictions`; -1 elsewhere."""
        stretch = Stretch.of(self.context.groups.sequence)
        wide = stretch.padded(length) // stretch.size
        row, column = predictions // length, predictions % length - stretch.rank * wide
        return torch.where((column >= 0) & (column < wide), row * wide + column, -1)

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
        here = Stretch.of(self.context.groups.sequence).cut(logits)
        return len(given) == 1 and torch.equal(given[0].float(), here.float())


@contextmanager
def _answering(head: Any, predictions: Tensor, tokens: Tensor, temperature: float) -> Iterator[None]:
    """Let the head return, in place of logits, log-probs and entropies [rows, length, 2] of `tokens` at `predictions`.

    Those of tokens at -1 are not wanted.
    """
    here = predictions >= 0
    places = predictions[here]

    def forward(hidden: Tensor) -> Tensor:
        chosen = hidden.flatten(0, 1)[places]
        found = torch.stack(chosen_scores(chosen, head.weight, head.bias, tokens[here], temperature=temperature), 1)
        answers = found.new_zeros(hidden.shape[0] * hidden.shape[1], 2)
        # Not a view, of which FSDP warns at every job's start.
        return answers.index_copy(0, places, found).view(*hidden.shape[:2], 2).clone()

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
