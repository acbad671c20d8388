"""Where an answer ends: tokens that generation stops after, and strings that it is cut off after."""

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Ends:
    """The tokenizer's end token, those that the model's folder names, and what the job adds.

    A string that is one token of the model's ends generation there. Of what was generated anyway after another one
    nothing is kept: the rest has the log-probabilities that it had, so the policy learns from what it said until then.

    Args:
        strings: end an answer, and are part of it.
        token_ids: the same, as tokens.

    Raises:
        SpecError: one of them is no token of the model's.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        folder: Path,
        strings: Sequence[str] = (),
        token_ids: Sequence[int] = (),
    ) -> None:
        if unknown := [id for id in token_ids if id >= len(tokenizer)]:
            raise SpecError(f"rollout.stop_token_ids: {unknown[0]} is none of the model's {len(tokenizer):,} tokens")
        self._tokenizer, self.strings = tokenizer, tuple(strings)
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in strings]
        whole = [ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id]
        known = [int(tokenizer.eos_token_id), *_of_model(folder), *token_ids, *whole]
        self.token_ids = tuple(dict.fromkeys(known))
        """The tokenizer's end token first."""

    def with_strings(self, strings: Sequence[str]) -> "Ends":
        """The same tokens, and these strings: one that is a token of the model's is looked for all the same."""
        other = copy(self)
        other.strings = tuple(strings)
        return other

    def kept(self, token_ids: Sequence[int]) -> int | None:
        """How many tokens there are up to the first string; None when there is none in them."""
        if not self.strings or not self._in(token_ids):
            return None
        return bisect_left(range(len(token_ids) + 1), True, key=lambda count: self._in(token_ids[:count]))

    def _in(self, token_ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(token_ids))
        return any(string in text for string in self.strings)


def _of_model(folder: Path) -> list[int]:
    """The end tokens that a model's `generation_config.json` names: chat models have several."""
    if not (folder / "generation_config.json").is_file():
        return []
    given = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if given is None:
        return []
    return [int(id) for id in given] if isinstance(given, list) else [int(given)]
