"""Step time of `TrainEngine` as a multiple of a hand-written FSDP2 loop, in one run.

    python -m benchmarks.training [--ranks 2] [--json FILE]

The same Qwen2 model, batches and optimizer twice: on an engine's workers, and in plain processes that PyTorch starts,
each of which makes its own batch. They take turns, step by step, so that both see the same machine; the engine's
figure includes sending the batch and getting the loss back. The median of the ratios of neighbouring steps is given,
and the ratio of CPU time (of all ranks and, for the engine, of this process), which other work on the machine disturbs
less.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlix
from rlix.nn import HuggingFaceFsdp2TrainModule, returns
from rlix.workers.prefork.server import NICENESS

VOCABULARY = 512


class Policy(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False)

    def train_step(self, ids: torch.Tensor) -> float:
        return step(self, self.optimizer, ids.to(self.device))

    @returns("sum")
    def cpu_seconds(self) -> float:
        return time.process_time()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def config(hidden: int, layers: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


def batch(number: int, size: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(1000 + number))


def plain_rank(rank: int, options: argparse.Namespace, store: str, commands: Connection) -> None:
    """One process of the hand-written loop: runs the steps it is told to; answers with loss and CPU time so far."""
    torch.set_num_threads(1)
    # As the engine's workers: Linux shares busy cores between sessions, and by niceness within each.
    os.setsid()
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    device = torch.device("cuda", rank) if options.cuda else torch.device("cpu")
    if options.cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if options.cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    mesh = init_device_mesh(device.type, (options.ranks,))
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config(options.hidden, options.layers)).to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    part = options.batch // options.ranks
    with contextlib.suppress(EOFError):  # the end of the run
        while True:
            ids = batch(commands.recv(), options.batch, options.length)[rank * part : (rank + 1) * part].to(device)
            commands.send((step(model, optimizer, ids), time.process_time()))


def start_plain(options: argparse.Namespace, folder: str) -> list[Connection]:
    """The hand-written loop's processes, which end with this one."""
    context = mp.get_context("spawn")
    pipes = []
    for rank in range(options.ranks):
        here, there = context.Pipe()
        context.Process(target=plain_rank, args=(rank, options, f"{folder}/store", there), daemon=True).start()
        there.close()  # so that reading from a process that died ends
        pipes.append(here)
    return pipes


def measure(options: argparse.Namespace, engine: rlix.TrainEngine, plain: list[Connection]) -> dict[str, list[float]]:
    """Wall seconds of each step, and CPU seconds of all together, once both are warm."""
    seconds: dict[str, list[float]] = {"plain": [], "engine": [], "plain cpu": [0.0], "engine cpu": [0.0]}
    for number in range(-options.warm_up, options.steps):
        start = time.perf_counter()
        for process in plain:
            process.send(number)
        answers = [process.recv() for process in plain]
        middle, here = time.perf_counter(), time.process_time()
        losses = engine.train_step(rlix.NeedParallel(batch(number, options.batch, options.length)))
        end, driver = time.perf_counter(), time.process_time() - here
        expected = sum(loss for loss, _ in answers) / len(answers)
        if abs(sum(losses) / len(losses) - expected) > 1e-3:
            raise SystemExit(f"the two loops do not train alike: losses {losses}, expected {expected}")
        if number == -1:
            before = (sum(cpu for _, cpu in answers), engine.cpu_seconds())
        if number >= 0:
            seconds["plain"].append(middle - start)
            seconds["engine"].append(end - middle)
            seconds["engine cpu"][0] += driver
    seconds["plain cpu"][0] = sum(cpu for _, cpu in answers) - before[0]
    seconds["engine cpu"][0] += engine.cpu_seconds() - before[1]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=5, help="further steps that are not counted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.cuda = torch.cuda.is_available()
    rlix.init(virtual_gpus=options.ranks)
    try:
        engine = rlix.TrainEngine((Policy, config(options.hidden, options.layers)))
        engine.build(tensor_parallel_size=options.ranks, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure(options, engine, start_plain(options, folder))
    finally:
        rlix.shutdown()
    plain, through = (statistics.median(seconds[name]) for name in ("plain", "engine"))
    ratios = [e / p for e, p in zip(seconds["engine"], seconds["plain"], strict=True)]
    result = {
        "ranks": options.ranks,
        "hidden": options.hidden,
        "layers": options.layers,
        "tokens_per_step": options.batch * options.length,
        "plain_ms": round(1000 * plain, 2),
        "engine_ms": round(1000 * through, 2),
        "engine_over_plain": round(statistics.median(ratios), 3),
        "plain_cpu_ms": round(1000 * seconds["plain cpu"][0] / options.steps, 2),
        "engine_cpu_ms": round(1000 * seconds["engine cpu"][0] / options.steps, 2),
        "engine_over_plain_cpu": round(seconds["engine cpu"][0] / seconds["plain cpu"][0], 3),
    }
    print("\n".join(f"{key:22} {value}" for key, value in result.items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
