"""What it costs a TRL script to be a job of a pool that is otherwise free: its steps plain and attached, in turns.

    python -m benchmarks.attaching [--steps N] [--rounds N] [--hidden N] [--layers N] [--tokens N] [--json]

Moves are the copies between device and host memory, leases what passes between asking for one and having it, and giving
it back. Every round does the same steps, equal to the bit: of each step the fastest round counts, on one thread; the
mean of all steps but the first.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

KINDS = ("plain", "attached")


class Meter:
    """Seconds spent in some methods so far."""

    def __init__(self, owner: type, *names: str) -> None:
        self.spent = 0.0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent += time.perf_counter() - start

        return outer


def train(model: Path, out: Path, steps: int, tokens: int, on_step: Callable[[], None]) -> None:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            on_step()

    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda completions, **_: [text.count("1") / 8 for text in completions],
        args=GRPOConfig(
            output_dir=str(out), per_device_train_batch_size=32, num_generations=8, max_completion_length=tokens,
            max_steps=steps, gradient_checkpointing=False, bf16=False, use_cpu=True, seed=7, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_steps=1,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i % 10}{i % 7}>" for i in range(64)]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        callbacks=[Steps()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def measure(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, by kind."""
    os.environ |= {name: str(folder / name) for name in ("RLIX_HOME", "RLIX_LOCK_DIR", "RLIX_RUNS_DIR")}
    os.environ |= {"RLIX_VIRTUAL_GPUS": "4", "RAY_ADDRESS": "local"}  # a control plane that ends with this process
    sys.modules["vllm"] = None  # type: ignore[assignment]  # which TRL would import, for seconds and for nothing
    import torch
    from transformers import Trainer

    from rlix.engine.guarded import GuardedSet
    from rlix.integrations.leases import ProgramGate
    from rlix.integrations.trl.install import install
    from rlix.pipeline.models import write_tiny_model
    from rlix.pipeline.spec.model import TinyModel

    torch.set_num_threads(1)
    model = write_tiny_model(TinyModel(hidden_size=args.hidden, layers=args.layers), folder / "model", seed=0)
    names = ("__init__", "train", "evaluate", "predict")
    methods = {"plain": {name: getattr(Trainer, name) for name in names}}
    session = install("attached")
    session.stages.end()
    methods["attached"] = {name: getattr(Trainer, name) for name in names}
    leases, moves = Meter(ProgramGate, "enter", "leave"), Meter(GuardedSet, "to_host", "to_device")
    rounds: dict[str, list[list[list[float]]]] = {kind: [] for kind in KINDS}  # of each its steps
    for number in range(2 * args.rounds):
        kind = KINDS[number % 2]
        for name, method in methods[kind].items():
            setattr(Trainer, name, method)
        at: list[list[float]] = []

        def stepped(at: list[list[float]] = at) -> None:
            at.append([time.perf_counter(), time.process_time(), leases.spent, moves.spent])

        train(model, folder / kind, args.steps, args.tokens, stepped)
        rounds[kind].append(
            [[1000 * (b - a) for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(at[1:])]
        )
        means = [mean(values) for values in zip(*rounds[kind][-1], strict=True)]
        print(f"round {number // 2}, {kind}: {means[0]:.0f} ms, {means[1]:.0f} ms of CPU", file=sys.stderr, flush=True)
    session.close()
    return {kind: fastest(found) for kind, found in rounds.items()}


def fastest(rounds: list[list[list[float]]]) -> dict[str, float]:
    steps = [[min(values) for values in zip(*same, strict=True)] for same in zip(*rounds, strict=True)]
    return dict(zip(("step", "cpu", "leases", "moves"), map(mean, zip(*steps, strict=True)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer; 32 answers a step")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = dict(measure(Path(folder), args))
    plain, attached = result["plain"], result["attached"]
    shares = {key: (attached[key] - attached["moves"]) / plain[key] - 1 for key in ("step", "cpu")}
    if args.json:
        print(json.dumps(result | {"besides_the_moves": shares}, indent=2))
        return
    for kind in KINDS:
        print(f"{kind:9}", ", ".join(f"{key} {value:.1f} ms" for key, value in result[kind].items()))
    print(f"besides the moves: {shares['step']:+.1%} of a plain step, {shares['cpu']:+.1%} of its CPU time")


if __name__ == "__main__":
    main()
