"""Model folders: the built-in tiny model written to disk, and Hugging Face models found there or on the hub."""

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlix.pipeline.hub import check_reachable
from rlix.pipeline.spec.model import quantized
from rlix.pipeline.tokenizer import character_tokenizer, load_tokenizer
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from rlix.pipeline.spec.model import ModelSpec, TinyModel

logger = logging.getLogger(__name__)

_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


def prepare_model(model: "ModelSpec", folder: Path, seed: int) -> Path:
    """A local folder with the model: a tiny one is written to `folder`, others are on disk or in the hub's cache.

    Raises SpecError when it is neither a folder nor a model that the hub has.
    """
    return write_tiny_model(model, folder, seed) if model.kind == "tiny" else local_model(model.path)


def tiny_config(model: "TinyModel") -> Qwen2Config:
    """The Qwen2 configuration of the built-in model, for the character tokenizer of its alphabet."""
    tokenizer = character_tokenizer(model.alphabet)
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=model.hidden_size,
        intermediate_size=4 * model.hidden_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        max_position_embeddings=model.context,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def write_tiny_model(model: "TinyModel", folder: Path, seed: int) -> Path:
    """Write config, weights drawn from `seed` and tokenizer to `folder`, unless they are there; return `folder`.

    The same seed gives the same weights; the caller's random state is left as it was.
    """
    if not (folder / "model.safetensors").is_file():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = Qwen2ForCausalLM(tiny_config(model))
        character_tokenizer(model.alphabet).save_pretrained(folder)
        module.save_pretrained(folder)
    return folder


def describe_tiny(model: "TinyModel", folder: Path) -> Path:
    """Write all of a tiny model but its weights to `folder`; return `folder`."""
    character_tokenizer(model.alphabet).save_pretrained(folder)
    tiny_config(model).save_pretrained(folder)
    return folder


def describe_model(model: Path, folder: Path, dtype: str) -> None:
    """Copy a model folder's configuration and tokenizer to `folder`: all but its weights, which will be of `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _DESCRIPTION:
        for file in model.glob(pattern):
            shutil.copy2(file, folder / file.name)
    config = folder / "config.json"
    values = json.loads(config.read_text())
    values.pop("torch_dtype", None)  # as older files call it
    config.write_text(json.dumps(values | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")


def local_model(path: str, field: str = "model.path") -> Path:
    """A local folder holding the model `path` names, which `field` says: itself, or the hub's files in the local cache.

    Raises SpecError when it is neither a folder nor a model the hub (or the cache, when offline) has, or is quantized.
    """
    if (folder := Path(path)).is_dir():
        return _plain(folder, field)
    try:
        check_reachable(path)
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return _plain(Path(snapshot_download(path, allow_patterns=patterns)), field)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise SpecError(
            f"{field}: {path!r} is neither a local folder nor a model the Hugging Face hub would send "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def teacher_of(path: str, student: Path) -> Path:
    """A local folder with the model that teaches the one in `student`.

    Raises SpecError when it cannot be had, or its tokens are others.
    """
    folder = local_model(path, "algorithm.options.teacher")
    if load_tokenizer(folder).get_vocab() != load_tokenizer(student).get_vocab():
        raise SpecError(
            f"algorithm.options.teacher: the tokens of {path!r} are not those of the model that learns; use a model "
            "with the same tokenizer"
        )
    return folder


def _plain(folder: Path, field: str) -> Path:
    if problem := quantized(folder):
        raise SpecError(f"{field}: {problem}")
    return folder
