"""Tokens/s of the transformers executor against `model.generate` of the same model in the same process."""

import tempfile

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.gpu.common import Row, qwen_config, seconds
from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions, Site
from rlix.engine.executors.transformers import TransformersExecutor
from rlix.engine.inference.requests import GenerationRequest
from rlix.engine.model_source import ModelSource
from rlix.protocol.messages import DeviceKind


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    config = qwen_config(1024, 16, 32_000) if cuda else qwen_config(64, 2, 512)
    prompts, prompt_tokens, tokens = (128, 64, 256) if cuda else (4, 8, 8)
    dtype = torch.bfloat16 if cuda else torch.float32
    ids = torch.randint(3, config.vocab_size, (prompts, prompt_tokens), device=device)
    count = prompts * tokens
    model = Qwen2ForCausalLM(config).to(device, dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)

        def direct() -> None:
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, top_k=0,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            assert out.numel() == prompts * (prompt_tokens + tokens)

        generate = count / seconds(direct, device, repeat=2)
        options = ExecutorOptions(
            max_model_len=512, max_num_seqs=prompts, gpu_memory_utilization=0.5, dtype=str(dtype).split(".")[-1]
        )
        executor = TransformersExecutor(
            ModelSource(path=folder), options, Site(DeviceKind.CUDA if cuda else DeviceKind.CPU)
        )
        try:
            executor.load(None, ALL_PARTS)
            requests = [
                GenerationRequest(id=str(number), prompt_ids=tuple(prompt), max_new_tokens=tokens, seed=number)
                for number, prompt in enumerate(ids.tolist())
            ]

            def through_executor() -> None:
                results = executor.submit(requests).result(timeout=300)
                assert sum(len(result.token_ids) for result in results) == count

            ours = count / seconds(through_executor, device, repeat=2)
        finally:
            executor.close()
    return [Row(f"{prompts} x {tokens} tokens", ours, "tok/s", "model.generate", generate, ">= 0.95")]
