"""A dense model of 0.7 billion parameters, trainer and replica on one GPU."""

import tempfile
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.gpu import closed_loop
from benchmarks.gpu.common import Row, qwen_config
from benchmarks.gpu.pool import pool


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name, pool() as devices:
        config = qwen_config(1536, 16, 32_000) if cuda else qwen_config(128, 2, 512)
        model = Path(name) / "model"
        Qwen2ForCausalLM(config).to(torch.bfloat16 if cuda else torch.float32).save_pretrained(model)
        return closed_loop.run(model, devices, "transformers").rows("dense")
