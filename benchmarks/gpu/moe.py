"""A mixture of experts (Qwen3-MoE), trainer and replica on one GPU."""

import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.gpu import closed_loop
from benchmarks.gpu.common import Row
from benchmarks.gpu.pool import pool


class Policy(closed_loop.Learns, Qwen3MoeForCausalLM):
    pass


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    width, layers, experts = (1024, 8, 16) if cuda else (64, 2, 4)
    config = Qwen3MoeConfig(
        vocab_size=32_000 if cuda else 512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 16, num_key_value_heads=2, head_dim=16, num_experts=experts,
        num_experts_per_tok=2, moe_intermediate_size=width, max_position_embeddings=512,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name, pool() as devices:
        model = Path(name) / "model"
        Qwen3MoeForCausalLM(config).to(torch.bfloat16 if cuda else torch.float32).save_pretrained(model)
        return closed_loop.run(model, devices, "transformers", Policy).rows("experts")
