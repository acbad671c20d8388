"""Whether memory grows: two engines on the same devices, one of which leaves before the other comes, again and again.

    python -m benchmarks.cycles [--cycles 100] [--json FILE]

A trainer of two ranks and an inference engine of two replicas share two devices. In a cycle the trainer leaves for the
host, the replicas come, take the trainer's weights every tenth time, answer a prompt and leave; then the trainer comes
back. Every fifth cycle drops all bytes instead (`meta`) and brings them back from files. Compared is what the workers
hold (resident and shared memory, open files) after the first cycles, which fill caches and pools, and at the end.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlix
from rlix.engine.movers import SwapMover
from rlix.engine.train.fsdp2 import Fsdp2Executor
from rlix.nn import HuggingFaceFsdp2TrainModule

WARM_UP = 10
"""Cycles before the first look: two of each kind."""


class Leaving(Fsdp2Executor):
    """Bytes leave a virtual device as they leave a real one."""

    def mover(self) -> SwapMover:
        return SwapMover(self.device)


class Learns(HuggingFaceFsdp2TrainModule):
    """What a causal LM learns by: to say again what it is given."""

    learning_rate = 1e-4

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def train_step(self, ids: list[list[int]]) -> float:
        tokens = torch.tensor(ids, device=self.device)
        loss = self(tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Policy(Learns, Qwen2ForCausalLM):
    pass


def build_model(path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def cycle(trainer: rlix.TrainEngine, replicas: rlix.InferenceEngine, number: int, state: Path) -> None:
    dropped = number % 5 == 4
    trainer.meta() if dropped else trainer.cpu()
    replicas.cuda()
    replicas.generate([[1, 2, 3]] * 2, {"max_new_tokens": 4, "ignore_eos": True})
    replicas.meta() if dropped else replicas.cpu()
    if dropped:
        trainer.load_state(state)
    else:
        trainer.cuda()
    trainer.train_step(rlix.NeedParallel([[1, 2, 3, 4]] * 2))
    if number % 10 == 0:
        replicas.cuda()
        trainer.p2p_weight_sync(replicas)
        replicas.cpu()


def held(engines: list[rlix.TrainEngine | rlix.InferenceEngine]) -> dict[str, float]:
    """MB of all workers together, and their open files; of /dev/shm what everybody has there."""
    workers = [psutil.Process(process.pid) for engine in engines for process in engine.processes.values()]
    memory = [worker.memory_full_info() for worker in workers]
    shared = os.statvfs("/dev/shm")
    return {
        "workers, MB": sum(each.uss for each in memory) / 1e6,
        "shared with others, MB": sum(each.rss - each.uss for each in memory) / 1e6,
        "this process, MB": psutil.Process().memory_full_info().uss / 1e6,
        "/dev/shm, MB": (shared.f_blocks - shared.f_bfree) * shared.f_frsize / 1e6,
        "open files": float(sum(worker.num_fds() for worker in workers)),
        "threads": float(sum(worker.num_threads() for worker in workers)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cycles <= WARM_UP:
        parser.error(f"--cycles must be more than {WARM_UP}, which come before the first look")
    looks = {}
    rlix.init(virtual_gpus=2, address="local")
    with tempfile.TemporaryDirectory() as folder:
        model, state = Path(folder) / "model", Path(folder) / "state"
        build_model(model)
        trainer = rlix.TrainEngine((Policy, str(model)), Leaving).build(shard=2, seed=0)
        replicas = rlix.InferenceEngine(model).build(devices=trainer.devices, load=False)
        trainer.train_step(rlix.NeedParallel([[1, 2, 3, 4]] * 2))
        trainer.save_state(state)
        start = time.perf_counter()
        for number in range(options.cycles):
            cycle(trainer, replicas, number, state)
            if number + 1 in (WARM_UP, (WARM_UP + options.cycles) // 2, options.cycles):
                looks[number + 1] = held([trainer, replicas])
        seconds = (time.perf_counter() - start) / options.cycles
        replicas.close()
        trainer.close()
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds_per_cycle": seconds, "after_cycles": looks}, indent=2))
    print(f"{seconds:.2f} s a cycle")
    print(f"{'after cycle':<24}" + "".join(f"{number:>10}" for number in looks))
    for name in looks[WARM_UP]:
        print(f"{name:<24}" + "".join(f"{look[name]:>10.1f}" for look in looks.values()))


if __name__ == "__main__":
    main()
