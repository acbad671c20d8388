"""A dense model of 0.7 billion parameters, trainer and replica on one GPU."""

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu import closed_loop
from benchmarks.gpu.common import Row
from benchmarks.gpu.pool import pool


def measure(device: torch.device) -> list[Row]:
    with tempfile.TemporaryDirectory() as name, pool() as devices:
        model = closed_loop.dense_model(Path(name), device.type == "cuda")
        return closed_loop.run(model, devices, "transformers").rows("dense")
