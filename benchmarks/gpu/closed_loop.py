"""A trainer and a replica that share one GPU: the GPU passes to and fro, then the trained weights go over.

After every way to and fro a greedy answer must be the one before; after a sync it must be another, and its
log-probabilities those that transformers computes with the weights that the trainer saved.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

import rlix
from benchmarks import cycles
from benchmarks.gpu.common import Row, qwen_config
from benchmarks.gpu.pool import expect, spent, used_mb
from rlix.protocol.messages import Device, DeviceKind

PROMPT, PARAMS = [[3, 5, 8, 13]], {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
OTHER, DRAWN = [[11, 2, 30, 4]], {"max_new_tokens": 16, "temperature": 1.0, "seed": 1, "ignore_eos": True}
"""What was not learnt, so that its log-probabilities are no zeros."""
ROUNDS = 5


class Learns(cycles.Learns):
    learning_rate = 1e-3  # a step is seen in the answers


class Policy(Learns, Qwen2ForCausalLM):
    pass


@dataclass(frozen=True, slots=True)
class Found:
    """`passing_s`: from one engine to the other, median. MB of the GPU, over what was there before any engine."""

    passing_s: float
    trainer_mb: float
    trainer_on_host_mb: float
    replica_mb: float
    both_on_host_mb: float
    both_on_meta_mb: float
    closed_mb: float
    sync_s: float
    weights_gb: float
    logprob_error: float

    def rows(self, what: str) -> list[Row]:
        rows = [
            Row(f"{what}, passing on", 1000 * self.passing_s, "ms", "a second", 1000.0),
            Row(f"{what}, weights of {self.weights_gb:.2f} GB sent", self.sync_s, "s", "a second", 1.0),
            Row(f"{what}, log-prob error after a sync", self.logprob_error, "nats", "allowed", ALLOWED, "< 1"),
        ]
        if not self.trainer_mb:
            return rows  # virtual GPUs
        return [
            *rows,
            Row(f"{what}, left by a trainer on the host", self.trainer_on_host_mb, "MB", "awake", self.trainer_mb),
            Row(f"{what}, left by both on the host", self.both_on_host_mb, "MB", "replica awake", self.replica_mb),
            Row(f"{what}, left by both on meta", self.both_on_meta_mb, "MB", "replica awake", self.replica_mb),
            Row(f"{what}, left by closed engines", self.closed_mb, "MB", "replica awake", self.replica_mb, "= 0"),
        ]


ALLOWED = 0.05
"""Nats: a bfloat16 forward of one batch against another's."""


def dense_model(folder: Path, cuda: bool) -> Path:
    """Of 0.7 billion parameters, in bfloat16; a tiny one for the CPU."""
    config = qwen_config(1536, 16, 32_000) if cuda else qwen_config(128, 2, 512)
    Qwen2ForCausalLM(config).to(torch.bfloat16 if cuda else torch.float32).save_pretrained(folder / "model")
    return folder / "model"


def run(model: Path, devices: tuple[Device, ...], executor: str, policy: type[Learns] = Policy) -> Found:
    one = devices[:1]
    share: dict[str, Any] = {"gpu_memory_utilization": 0.3} if one[0].kind is DeviceKind.CUDA else {}
    nothing = used_mb(one)

    def used() -> float:
        return used_mb(one) - nothing

    with (
        rlix.TrainEngine((policy, str(model))).build(devices=one) as trainer,
        rlix.InferenceEngine(model, executor) as replica,
    ):
        trainer.train_step(PROMPT)
        trainer_mb = used()
        trainer.cpu()
        trainer_on_host_mb = used()
        replica.build(colocate_with=trainer, max_model_len=256, **share)
        replica_mb = used() - trainer_on_host_mb
        before = answer(replica)
        moves = []
        for _ in range(ROUNDS):
            for leaving, arriving in ((replica, trainer), (trainer, replica)):
                moves.append(spent(leaving.cpu) + spent(arriving.cuda))
            expect(answer(replica) == before, "weights that left and came back answer otherwise")
        replica.cpu()
        both_on_host_mb = used()
        trainer.cuda()
        for _ in range(20):
            trainer.train_step(PROMPT)
        trainer.save(model.with_name("trained"))
        trainer.cpu()
        replica.cuda()
        spent(lambda: trainer.p2p_weight_sync(replica))  # the first one finds nothing kept
        sync_s = spent(lambda: trainer.p2p_weight_sync(replica))
        expect(answer(replica) != before, "after a sync of trained weights the answer is the old one")
        error = _logprob_error(replica, model.with_name("trained"))
        replica.meta()
        trainer.meta()
        both_on_meta_mb = used()
    return Found(
        passing_s=median(moves[2:]),
        trainer_mb=trainer_mb,
        trainer_on_host_mb=trainer_on_host_mb,
        replica_mb=replica_mb,
        both_on_host_mb=both_on_host_mb,
        both_on_meta_mb=both_on_meta_mb,
        closed_mb=used(),
        sync_s=sync_s,
        weights_gb=sum(path.stat().st_size for path in model.glob("*.safetensors")) / 1e9,
        logprob_error=error,
    )


def answer(engine: rlix.InferenceEngine) -> tuple[int, ...]:
    tokens: tuple[int, ...] = tuple(engine.generate(PROMPT, PARAMS)[0].outputs[0].token_ids)
    return tokens


@torch.no_grad()
def _logprob_error(replica: rlix.InferenceEngine, trained: Path) -> float:
    """The largest difference of a token's log-probability from transformers' own, in float32 on the CPU."""
    output = replica.generate(OTHER, DRAWN)[0].outputs[0]
    module = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    ids = torch.tensor([OTHER[0] + list(output.token_ids)])
    every = module(ids).logits[0, len(OTHER[0]) - 1 : -1].log_softmax(-1)
    there = every.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    return float((there - torch.tensor(output.logprobs)).abs().max())
