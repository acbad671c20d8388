"""One token per character, as a real Hugging Face fast tokenizer, and loading of any other."""

import logging
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlix.engine.tokenizer import saved_tokenizer
from rlix.protocol.errors import SpecError

logger = logging.getLogger(__name__)

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
_SHOWN = 8
_TEXT = 60  # characters
CONFIG = "config.json"
_said: set[str] = set()  # characters
_embedded: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()
"""How many tokens the models have whose tokenizers were loaded here."""


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Four special tokens, then each character of `alphabet` in order. Encoding starts with the begin token.

    A character outside the alphabet becomes the unknown token; whoever encodes text from outside checks for it.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNKNOWN, *alphabet])}
    if len(vocabulary) != len(alphabet) + 4:
        raise SpecError(f"alphabet {alphabet!r} holds a character twice")
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a local model folder, with a padding token.

    Raises:
        SpecError: there is none, it has no end token, or its end is none of the tokens that the model has.
    """
    try:
        tokenizer = saved_tokenizer(folder, local_only=True)
    except (OSError, ValueError) as error:
        raise SpecError(f"model folder {folder} has no tokenizer that transformers can load: {error}") from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # as transformers makes one of nothing
        raise SpecError(
            f"model folder {folder} has no tokenizer (no tokenizer.json, say); save it there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if tokenizer.eos_token_id is None:
        raise SpecError(f"the tokenizer in {folder} has no end-of-sequence token; a rollout would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if (folder / CONFIG).is_file():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _embedded[tokenizer] = int(getattr(config.get_text_config(), "vocab_size", len(tokenizer)))
    check_embedded(tokenizer, [tokenizer.eos_token_id, tokenizer.pad_token_id], f"model folder {folder}")
    return tokenizer


def check_embedded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], where: str) -> None:
    """Raises SpecError when the model has no embedding of one of these tokens. A tokenizer may have some that nobody
    uses."""
    rows = _embedded.get(tokenizer)
    if rows is not None and ids and max(ids) >= rows:
        token = tokenizer.convert_ids_to_tokens([max(ids)])[0]
        raise SpecError(
            f"{where}: {token!r} is token {max(ids):,} of the tokenizer, and the model has {rows:,}, counted from 0 "
            "(vocab_size in config.json): use the tokenizer that belongs to the model, or save the model after "
            "model.resize_token_embeddings(len(tokenizer))"
        )


def knows(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Whether none of the tokens stands for something that the tokenizer does not know."""
    unknown = tokenizer.unk_token_id
    return unknown is None or unknown not in ids


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, where: str, *, special: bool) -> tuple[int, ...]:
    """The tokens of a text that is there before a job starts, all of which must be known; `special` as of `read`.

    Raises SpecError, which begins with `where`.
    """
    ids = tuple(tokenizer.encode(text, add_special_tokens=special))
    check_embedded(tokenizer, ids, where)
    if not knows(tokenizer, ids):
        raise SpecError(
            f"{where}: the model's tokenizer does not know every character of {text[:_TEXT]!r}; add them to "
            "model.alphabet, or use another model"
        )
    return ids


def read(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> tuple[int, ...]:
    """What the policy reads of a text that is made while a job runs: what its tokenizer does not know is left as the
    token for that, and the first such characters are named in the log.

    Args:
        special: whether the tokenizer puts its special tokens around it.
    """
    ids = tuple(tokenizer.encode(text, add_special_tokens=special))
    check_embedded(tokenizer, ids, f"{text[:_TEXT]!r}")
    if len(_said) < _SHOWN and not knows(tokenizer, ids):
        unknown = {c for c in set(text) - _said if not knows(tokenizer, tokenizer.encode(c, add_special_tokens=False))}
        if new := "".join(sorted(unknown)):
            _said.update(new)
            said = "the model's tokenizer does not know %r: the policy reads %s in its place, in %.200r"
            logger.warning(said, new, tokenizer.unk_token, text)
    return ids
