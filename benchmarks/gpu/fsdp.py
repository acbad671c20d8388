"""A training step of the engine's module under FSDP2 on one rank, as a multiple of the plain module's."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2ForCausalLM

from benchmarks.gpu.common import Row, qwen_config, seconds
from rlix.engine.train.fsdp2 import shard
from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.nn import HuggingFaceFsdp2TrainModule


class Policy(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    pass


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    config = qwen_config(1536, 16, 32_000) if cuda else qwen_config(64, 2, 512)
    ids = torch.randint(0, config.vocab_size, (8, 1024) if cuda else (2, 32), device=device)
    spec = ModuleSpec(Policy, (config,), dtype="bfloat16" if cuda else "float32")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh(device.type, (1,))
            plain = _step_seconds(spec, ids, device, None)
            sharded = _step_seconds(spec, ids, device, mesh)
        finally:
            dist.destroy_process_group()
    return [Row("FSDP2 step on one rank", 1000 * sharded, "ms", "plain", 1000 * plain)]


def _step_seconds(
    spec: ModuleSpec, ids: torch.Tensor, device: torch.device, mesh: dist.device_mesh.DeviceMesh | None
) -> float:
    module = build_module(spec, device, None if mesh is None else lambda unit: shard(unit, mesh, spec))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        module(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds(step, device, repeat=8, warm_up=3)
