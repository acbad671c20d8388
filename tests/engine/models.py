"""Small models for the engine's tests."""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlix.engine.weights.publication import PublishedWeights, named_weights, publish, tied_names

VOCABULARY = 97

torch.set_num_threads(1)  # on a busy machine, threads that wait for each other cost far more than they save


def qwen(**overrides: object) -> Qwen2Config:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # sharper than the default: greedy answers differ between prompts
    }
    return Qwen2Config(**{**values, **overrides})


def llama() -> LlamaConfig:
    return LlamaConfig(**{k: v for k, v in qwen(tie_word_embeddings=True).to_dict().items() if k != "model_type"})


def model(seed: int, config: Qwen2Config | None = None) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config or qwen()).eval()


def folder(path: Path, seed: int, config: Qwen2Config | None = None) -> Path:
    model(seed, config).save_pretrained(path)
    return path


def published(module: torch.nn.Module, version: int) -> PublishedWeights:
    """Buckets in plain memory instead of Ray's store."""
    named = named_weights(module)
    names = tied_names(named)
    return publish(((n, named[n]) for n in names), version, aliases=names, put=lambda data: data.copy())


@torch.no_grad()
def greedy(module: torch.nn.Module, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, module(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tuple(ids[0, len(prompt) :].tolist())


@torch.no_grad()
def logprobs(module: torch.nn.Module, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([prompt + answer])
    distribution = module(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return distribution.gather(1, torch.tensor(answer)[:, None])[:, 0]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter, from id 3."""
    letters = {letter: i + 3 for i, letter in enumerate(string.ascii_letters)}
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **letters, **{f"<{i}>": i for i in range(55, VOCABULARY)}}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
