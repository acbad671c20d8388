"""What equals what, to the bit: answers in other batches, and training steps that are taken again."""

import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

import rlix
from benchmarks.gpu import closed_loop
from benchmarks.gpu.common import Row, qwen_config
from benchmarks.gpu.pool import pool
from rlix.protocol.messages import Device

PROMPTS, STEPS = 48, 10
Answer = tuple[tuple[int, ...], tuple[float, ...]]


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name, pool() as devices:
        config = qwen_config(1024, 8, 4_000) if cuda else qwen_config(64, 2, 512)
        rows = []
        for dtype in (torch.float32, torch.bfloat16):
            model = Path(name) / str(dtype)
            Qwen2ForCausalLM(config).to(dtype).save_pretrained(model)
            for exact in (True, False):
                same, tokens = _answers(model, devices, exact)
                what = f"{str(dtype).removeprefix('torch.')}, {'exact' if exact else 'plain'}"
                rows.append(Row(f"{what}: answers alone", same, "", "in one batch", PROMPTS, "= 1" if exact else ""))
                rows.append(Row(f"{what}: their tokens", tokens, "", "in one batch", PROMPTS))
        first, again = (_losses(Path(name) / "torch.float32", devices) for _ in range(2))
        rows.append(Row("training steps taken again", _equal(first, again), "", "steps", STEPS, "= 1"))
        return rows


def _answers(model: Path, devices: tuple[Device, ...], exact: bool) -> tuple[int, int]:
    """How many answers are the same in batches of one or six, log-probabilities included; and how many their tokens."""
    source = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 500, (4 + n % 29,), generator=source).tolist() for n in range(PROMPTS)]
    params = [{"max_new_tokens": 24, "temperature": 1.0, "seed": n, "ignore_eos": True} for n in range(PROMPTS)]

    def some(first: int, last: int) -> list[Answer]:
        found = engine.generate(prompts[first:last], params[first:last])
        return [(tuple(one.outputs[0].token_ids), tuple(one.outputs[0].logprobs)) for one in found]

    with rlix.InferenceEngine(model, "transformers") as engine:
        engine.build(devices=devices[:1], max_model_len=128, exact=exact, kv_cache_bytes=2**30)
        together = some(0, PROMPTS)
        ends = [*range(PROMPTS // 4), *range(PROMPTS // 4, PROMPTS + 1, 6)]
        apart = [one for first, last in pairwise(ends) for one in some(first, last)]
    return _equal(together, apart), _equal([tokens for tokens, _ in together], [tokens for tokens, _ in apart])


def _losses(model: Path, devices: tuple[Device, ...]) -> list[float]:
    source = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, 500, (16, 256), generator=source).tolist() for _ in range(STEPS)]
    with rlix.TrainEngine((closed_loop.Policy, str(model))).build(devices=devices[:1], seed=0) as trainer:
        return [trainer.train_step(rlix.NeedParallel(batch))[0] for batch in batches]


def _equal(one: Iterable[object], other: Iterable[object]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))
