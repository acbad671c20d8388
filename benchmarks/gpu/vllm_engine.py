"""vLLM, where it is installed: sleep and waking, new weights, on two GPUs tensor parallelism, and FP8 rollouts."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm  # noqa: F401  (the section is skipped without it)

import rlix
from benchmarks.gpu import closed_loop
from benchmarks.gpu.common import Row
from benchmarks.gpu.pool import expect, pool, spent
from rlix.protocol.messages import Device


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as name, pool() as devices:
        model = closed_loop.dense_model(Path(name), cuda)
        rows = closed_loop.run(model, devices, "vllm").rows("vLLM")
        share: dict[str, Any] = {"gpu_memory_utilization": 0.3} if cuda else {}
        rows += _asleep(model, devices, share)
        if cuda:
            rows.append(_fp8(model, share))
        return rows


def _asleep(model: Path, devices: tuple[Device, ...], share: dict[str, Any]) -> list[Row]:
    """And the weights of a trainer on as many GPUs, whose answer is known."""
    width = min(2, len(devices))
    engine = rlix.InferenceEngine(model, "vllm")
    building = spent(lambda: engine.build(tensor_parallel_size=width, max_model_len=256, **share))
    with engine:
        before = closed_loop.answer(engine)
        away = spent(engine.cpu) + spent(engine.cuda)
        expect(closed_loop.answer(engine) == before, "vLLM answers otherwise after it slept")
        engine.meta()
        anew = spent(engine.cuda)
        expect(closed_loop.answer(engine) == before, "vLLM answers otherwise after its weights were read again")
        engine.cpu()
        with rlix.TrainEngine((closed_loop.Policy, str(model))).build(colocate_with=engine) as trainer:
            trainer.cpu()
            engine.cuda()
            update = spent(lambda: trainer.p2p_weight_sync(engine))
            expect(closed_loop.answer(engine) == before, "vLLM answers otherwise after the same weights were sent")
    what = f"vLLM on {width}"
    return [
        Row(f"{what}, sleep and wake", 1000 * away, "ms", "start", 1000 * building, "< 0.1"),
        Row(f"{what}, weights read again", 1000 * anew, "ms", "start", 1000 * building),
        Row(f"{what}, weights sent", 1000 * update, "ms", "start", 1000 * building),
    ]


def _fp8(model: Path, share: dict[str, Any]) -> Row:
    """Of a random model: how far log-probabilities of quantized rollouts are from those of the plain ones."""
    answers = []
    for options in ({}, {"quantization": "fp8"}):
        with rlix.InferenceEngine(model, "vllm") as engine:
            engine.build(max_model_len=256, executor_options=options, **share)
            answers.append(engine.generate(closed_loop.PROMPT, closed_loop.PARAMS)[0].outputs[0])
    plain, quantized = answers
    error = abs(plain.logprobs[0] - quantized.logprobs[0])
    return Row("vLLM in FP8, log-prob of a first token", error, "nats", "allowed", 1.0, "< 1")
