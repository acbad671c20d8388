"""A tokenizer with one token per byte and Qwen's special tokens; chat templates and sizes as models ship them."""

from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def qwen_7b() -> Qwen2Config:
    """The sizes of Qwen2.5-7B-Instruct."""
    return Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )


def template(name: str) -> str:
    """One of the templates that TRL keeps, as their models ship them."""
    return files("trl").joinpath("chat_templates", f"{name}.jinja").read_text()


def byte_tokenizer(chat_template: str | None = None) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = chat_template
    return made
