"""Generation speed: tokens/s through `InferenceEngine` against the backend called directly, in one run.

    python -m benchmarks.generation [--executor transformers|vllm] [--prompts 256] [--tokens 64] [--json FILE]

All answer the same prompts with the same small Qwen2 model on one thread, taking turns; compared are neighbours. Called
directly means what a user would write: `model.generate` with the log-probability of each token, or vLLM's
`LLM.generate` with the settings the engine uses. The engine's figure includes everything between a user and the
backend: the process boundary, requests and results. Tokens per second of CPU time are compared as well, which other
work on the machine disturbs less. Executor "transformers" is measured in both of its modes.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlix
from rlix.engine.executors.registry import backend
from rlix.protocol.messages import DeviceKind
from rlix.workers.prefork.server import NICENESS

TRANSFORMERS = {"fast": False, "exact": True}  # name of a measurement -> what `exact` is
VLLM = {"engine": None}


def through(engine: rlix.InferenceEngine, prompts: list[list[int]], tokens: int) -> int:
    outputs = engine.generate(prompts, {"max_new_tokens": tokens, "ignore_eos": True})
    return sum(len(output.outputs[0].logprobs) for output in outputs)


def build_model(path: Path, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def direct_transformers(path: Path, prompts: list[list[int]], tokens: int) -> Callable[[], int]:
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)

    def run() -> int:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        answers = out.sequences[:, ids.shape[1] :, None]
        return torch.stack(out.logits, 1).log_softmax(-1).gather(-1, answers).numel()

    return run


def direct_vllm(path: Path, prompts: list[list[int]], tokens: int) -> Callable[[], int]:
    from vllm import LLM, SamplingParams

    cpu = not torch.cuda.is_available()
    llm = LLM(
        model=str(path),
        skip_tokenizer_init=True,
        dtype="float32" if cpu else "auto",
        enforce_eager=cpu,
        max_num_seqs=256,
        logprobs_mode="raw_logprobs",
        gpu_memory_utilization=0.4,
        **({"kv_cache_memory_bytes": 64 * 2**20} if cpu else {}),
    )
    requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]

    def run() -> int:
        params = [
            SamplingParams(max_tokens=tokens, seed=i, ignore_eos=True, logprobs=0, detokenize=False)
            for i in range(len(prompts))
        ]
        outputs = llm.generate(requests, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def cpu_seconds(engine: rlix.InferenceEngine | None) -> float:
    """Of this process and of the engine's replicas, so far."""
    handles: list[Any] = list(engine.replicas.handles) if engine else []
    theirs: list[float] = ray.get([handle.__ray_call__.remote(lambda _: time.process_time()) for handle in handles])
    return time.process_time() + sum(theirs)


def measure(
    runs: dict[str, Callable[[], int]], cpu: dict[str, Callable[[], float]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second, and per second of CPU time, of each round, taking turns after one unmeasured round."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    cpu_rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            used, start = cpu[name](), time.perf_counter()
            count = run()
            end = time.perf_counter()
            if number:
                rates[name].append(count / (end - start))
                cpu_rates[name].append(count / (cpu[name]() - used))
    return rates, cpu_rates


def over_direct(rates: dict[str, list[float]], name: str) -> float:
    """Median of the ratios of neighbouring runs: what else the machine does changes from round to round."""
    return statistics.median(ours / direct for ours, direct in zip(rates[name], rates["direct"], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kind = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU
    os.environ.update(backend(options.executor).environment(kind, 1, True))
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = (options.prompts, options.prompt_tokens)
    prompts: list[list[int]] = torch.randint(3, 512, shape, generator=generator).tolist()
    direct = {"transformers": direct_transformers, "vllm": direct_vllm}[options.executor]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        build_model(path, options.hidden, options.layers)
        transformers.utils.logging.disable_progress_bar()
        rlix.init(virtual_gpus=None if kind is DeviceKind.CUDA else 2)
        if options.executor == "transformers":
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)  # as workers that are forked
        try:
            runs = {"direct": direct(path, prompts, options.tokens)}
            cpu: dict[str, Callable[[], float]] = {"direct": partial(cpu_seconds, None)}
            for name, exact in (VLLM if options.executor == "vllm" else TRANSFORMERS).items():
                engine = rlix.InferenceEngine(path, executor=options.executor)
                engine.build(gpu_memory_utilization=0.4, exact=exact)
                runs[name] = partial(through, engine, prompts, options.tokens)
                cpu[name] = partial(cpu_seconds, engine)
            rates, cpu_rates = measure(runs, cpu, options.rounds)
        finally:
            rlix.shutdown()
    result = {
        "executor": options.executor,
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "tokens": options.tokens,
        "hidden": options.hidden,
        "layers": options.layers,
        **{f"{name}_tokens_per_s": round(statistics.median(values)) for name, values in rates.items()},
        **{f"{name}_over_direct": round(over_direct(rates, name), 3) for name in rates if name != "direct"},
        **{f"{name}_over_direct_cpu": round(over_direct(cpu_rates, name), 3) for name in rates if name != "direct"},
    }
    print("\n".join(f"{key:24} {value}" for key, value in result.items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
