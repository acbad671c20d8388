"""One token per character, as a real Hugging Face fast tokenizer, and loading of any other."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlix.protocol.errors import SpecError

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"


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
    """The tokenizer saved in a local model folder, with a padding token. Raises SpecError when it has no end token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SpecError(f"model folder {folder} has no tokenizer that transformers can load: {error}") from error
    if tokenizer.eos_token_id is None:
        raise SpecError(f"the tokenizer in {folder} has no end-of-sequence token; a rollout would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
