"""A model's tokenizer: the one that was saved with it."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

FILE = "tokenizer.json"
_RULES = ("normalizer", "pre_tokenizer", "model", "decoder")


def saved_tokenizer(source: str | Path, *, local_only: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name, which makes of text what its `tokenizer.json` says.

    For most kinds of model transformers builds a tokenizer of the kind's own from the saved vocabulary. Where that
    splits, normalises or decodes text otherwise than the saved one (a folder of Qwen2's kind may hold any tokenizer),
    the saved one is taken as it is.

    Raises:
        OSError, ValueError: there is none that transformers can load.
    """
    by_kind: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, local_files_only=local_only)
    if not isinstance(by_kind, PreTrainedTokenizerFast) or not _has_file(source):
        return by_kind
    saved: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(source, local_files_only=local_only)
    return by_kind if _rules(by_kind) == _rules(saved) else saved


def _has_file(source: str | Path) -> bool:
    if Path(source).is_dir():
        return (Path(source) / FILE).is_file()
    return (
        cached_file(str(source), FILE, local_files_only=True, _raise_exceptions_for_missing_entries=False) is not None
    )


def _rules(tokenizer: Any) -> dict[str, Any]:
    """How text becomes tokens and the other way round; special tokens, which a configuration may add to, aside."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    return {part: whole[part] for part in _RULES}
