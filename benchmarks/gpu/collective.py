"""A training rank is killed while the others wait for it in a collective; needs two GPUs."""

import os
import signal
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

import rlix
from benchmarks.gpu import closed_loop
from benchmarks.gpu.common import Row, qwen_config
from benchmarks.gpu.pool import expect, pool, spent
from rlix.protocol.errors import RlixError

LIMIT_S = 60.0


class Policy(closed_loop.Policy):
    def dies_before_the_gradients(self, rank: int) -> float:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.train_step([[3, 5, 8, 13]])


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name, pool() as devices:
        if len(devices) < 2:
            raise ImportError("one GPU: ranks of a collective need one each")
        model = Path(name) / "model"
        config = qwen_config(1536, 16, 32_000) if cuda else qwen_config(128, 2, 512)
        Qwen2ForCausalLM(config).save_pretrained(model)
        with rlix.TrainEngine((Policy, str(model))).build(devices=devices[:2]) as trainer:
            batch = rlix.NeedParallel([[3, 5, 8, 13]] * 2)
            trainer.train_step(batch)

            def dies() -> None:
                try:
                    trainer.dies_before_the_gradients(1)
                except RlixError as error:
                    print(f"said: {error}")
                else:
                    raise AssertionError("a call with a killed rank returned")

            told = spent(dies)
            expect(told < LIMIT_S, f"the others waited {told:.0f} s for a killed rank")
        return [Row("a rank killed in a collective: told after", told, "s", "allowed", LIMIT_S, "< 1")]
