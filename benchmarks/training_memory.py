"""Peak memory of an update and of log-probs while the batch grows, in micro-batches and in one pass over everything.

    python -m benchmarks.training_memory [--json FILE]

Each case is a process of its own: a Qwen2 with random weights computes log-probs and takes a policy step, on the CPU,
with one thread. *Micro-batches* is what a job does, with a budget of `--budget` tokens; *one pass* is plain PyTorch
over the whole batch with whole logits. The figure is how far the process's resident memory rises, at its peak, above
what it was with the weights, their gradients and the optimizer's state in place. Linux only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.spec.algorithm import AlgorithmSpec
from rlix.pipeline.spec.training import OptimizerSpec, TrainingSpec
from rlix.pipeline.training.policy import PolicyModule, policy_on_meta

CASES: dict[str, dict[str, Any] | None] = {
    "one pass": None,
    "micro-batches": {},
    "micro-batches, packed": {"packing": True},
    "micro-batches, checkpointing": {"activation_checkpointing": True},
}


def write_model(folder: Path, options: argparse.Namespace) -> None:
    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def batch(rows: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Prompts of 16 tokens; answers of an eighth of the length to all of it, the same mix whatever the number."""
    source = torch.Generator().manual_seed(0)
    mask = torch.zeros(rows, length - 1)
    for row in range(rows):
        mask[row, 15 : 15 + max(1, (length - 16) * (row % 8 + 1) // 8)] = 1.0
    return {
        "input_ids": torch.randint(0, vocabulary, (rows, length), generator=source),
        "mask": mask,
        "advantages": torch.randn(rows, generator=source),
    }


def memory(name: str) -> float:
    """MiB of this process: VmRSS now, or VmHWM, the most since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def plain_log_probs(model: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=tensors["input_ids"], use_cache=False).logits[:, :-1].float()
    chosen: torch.Tensor = logits.log_softmax(-1).gather(2, tensors["input_ids"][:, 1:, None])[..., 0]
    return chosen


def plain_step(model: PolicyModule, tensors: dict[str, torch.Tensor]) -> None:
    log_probs = plain_log_probs(model, tensors)
    ratio = (log_probs - log_probs.detach()).exp()
    loss = -(ratio * tensors["advantages"][:, None] * tensors["mask"]).sum() / tensors["mask"].sum()
    torch.autograd.backward(loss)
    model.clip_grad_norm(1.0)
    model.optimizer.step()
    model.optimizer.zero_grad(set_to_none=False)


def one_case(options: argparse.Namespace) -> None:
    """In a process of its own; prints one line of JSON."""
    torch.set_num_threads(1)
    folder = Path(options.folder)
    meta = policy_on_meta(folder)
    args, kwargs = meta.rlix_init
    spec = ModuleSpec(module_class=type(meta), args=args, kwargs=kwargs, weights_path=str(folder))
    model: Any = build_module(spec, torch.device("cpu"), None)
    settings = CASES[options.case]
    training = TrainingSpec(micro_batch_tokens=options.budget, **(settings or {}))
    model.configure_optimizer(OptimizerSpec(), training)
    algorithm = build_algorithm(AlgorithmSpec(), options.length)

    def log_probs(tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            model.log_probs(tensors, 1.0) if settings is not None else plain_log_probs(model, tensors)

    def step(tensors: dict[str, torch.Tensor]) -> None:
        if settings is None:
            plain_step(model, tensors)
        else:
            model.policy_step(tensors, algorithm.denominator(tensors["mask"]), algorithm, 1.0, 1.0)

    step(batch(1, 32, options.vocabulary))  # makes gradients and the optimizer's state
    tensors = batch(options.rows, options.length, options.vocabulary)
    result = {}
    for name, run in (("log_probs", log_probs), ("step", step)):
        result[name] = measured(run, tensors)
    print(json.dumps(result))


def measured(run: Callable[[dict[str, torch.Tensor]], None], tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = memory("VmRSS"), time.process_time()
    run(tensors)
    return {"mib": memory("VmHWM") - before, "cpu_s": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.case:
        one_case(options)
        return
    results: dict[str, dict[int, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options)
        for case in CASES:
            for rows in options.batches:
                command = [
                    sys.executable,
                    __file__,
                    *sys.argv[1:],
                    "--case",
                    case,
                    "--rows",
                    str(rows),
                    "--folder",
                    folder,
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.setdefault(case, {})[rows] = json.loads(done.stdout.splitlines()[-1])
                found = results[case][rows]
                print(
                    f"{case:30} {rows:4} × {options.length} tokens: log-probs {found['log_probs']['mib']:6.0f} MiB, "
                    f"step {found['step']['mib']:6.0f} MiB, {found['step']['cpu_s']:5.1f} CPU s"
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
