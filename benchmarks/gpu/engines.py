"""Both engines on one GPU, with their workers in processes of their own: moves, passing the GPU on, new weights, jobs.

A trainer and an inference engine share the GPU, with `transformers`, then with vLLM (its sleep and waking) where it
is installed. After every way to and fro a greedy answer must be the one before, and after a sync another. On two GPUs
vLLM has tensor-parallel workers. Last, two jobs share the GPU by leases.
"""

import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

import rlix
from benchmarks import cycles
from benchmarks.gpu.common import Row, qwen_config
from rlix.engine.placement import pool_devices

PROMPT, PARAMS = [[3, 5, 8, 13]], {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
ROUNDS = 5
JOB_S = 240.0


class Policy(cycles.Policy):
    learning_rate = 1e-3  # a step is seen in the answers


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    rlix.init(virtual_gpus=2, address="local", log_level="WARNING")
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = qwen_config(1536, 16, 32_000) if cuda else qwen_config(128, 2, 512)
            Qwen2ForCausalLM(config).to(torch.bfloat16 if cuda else torch.float32).save_pretrained(folder / "model")
            passing = _rounds(folder / "model", cuda, "transformers")
            rows = []
            if find_spec("vllm") is None:
                print("no vLLM here: its sleep and waking are not tried")
            else:
                rows += _vllm(folder / "model", cuda, passing)
            rows.append(_two_jobs(folder / "runs"))
            return rows
    finally:
        rlix.shutdown()


def _rounds(model: Path, cuda: bool, executor: str) -> float:
    """Seconds to pass a GPU from a trainer to replicas, or back."""
    share: dict[str, Any] = {"gpu_memory_utilization": 0.3} if cuda else {}
    with (
        rlix.TrainEngine((Policy, str(model))).build(devices=pool_devices()[:1]) as trainer,
        rlix.InferenceEngine(model, executor) as replica,
    ):
        trainer.train_step(PROMPT)
        trainer.cpu()
        replica.build(colocate_with=trainer, max_model_len=256, **share)
        before = _answer(replica)
        spent = []
        for _ in range(ROUNDS):
            for leaving, arriving in ((replica, trainer), (trainer, replica)):
                spent.append(_seconds(leaving.cpu) + _seconds(arriving.cuda))
            _expect(_answer(replica) == before, "weights that left and came back answer otherwise")
        replica.cpu()
        trainer.cuda()
        for _ in range(20):
            trainer.train_step(PROMPT)
        trainer.cpu()
        replica.cuda()
        trainer.p2p_weight_sync(replica)
        _expect(_answer(replica) != before, "after a sync of trained weights the answer is the old one")
    return median(spent[2:])


def _vllm(model: Path, cuda: bool, plainly: float) -> list[Row]:
    passing = _rounds(model, cuda, "vllm")
    start = time.perf_counter()
    width = 2 if len(pool_devices()) > 1 else 1
    share: dict[str, Any] = {"gpu_memory_utilization": 0.3} if cuda else {}
    engine = rlix.InferenceEngine(model, "vllm").build(tensor_parallel_size=width, max_model_len=256, **share)
    building = time.perf_counter() - start
    with engine:
        before = _answer(engine)
        away = _seconds(engine.cpu) + _seconds(engine.cuda)
        _expect(_answer(engine) == before, "vLLM answers otherwise after it slept")
        engine.meta()
        anew = _seconds(engine.cuda)
        _expect(_answer(engine) == before, "vLLM answers otherwise after its weights were read again")
    what = f"vLLM on {width}"
    return [
        Row("vLLM, passing on", 1000 * passing, "ms", "transformers", 1000 * plainly),
        Row(f"{what}, sleep and wake", 1000 * away, "ms", "start", 1000 * building, "< 0.1"),
        Row(f"{what}, weights read again", 1000 * anew, "ms", "start", 1000 * building),
    ]


def _two_jobs(runs: Path) -> Row:
    """Two of the shipped jobs on one GPU by turns, within the time they may take."""
    jobs = []
    for name in ("sort_digits", "copy_digits"):
        base = rlix.load_job(name).model_dump() | {"steps": 10}
        base["clusters"] = {"actor_train": {"devices": (0,)}, "actor_infer": {"devices": (0,)}}
        jobs.append(rlix.JobSpec.model_validate(base))
    start = time.perf_counter()
    for job in rlix.launch(jobs, runs_dir=runs):
        ended = job.wait(timeout_s=JOB_S)
        _expect(ended.state == "finished", f"{job.name}: {ended}")
    together = time.perf_counter() - start
    return Row("two jobs of 10 steps together", together, "s", "limit", JOB_S, "< 1")


def _answer(engine: rlix.InferenceEngine) -> tuple[int, ...]:
    tokens: tuple[int, ...] = tuple(engine.generate(PROMPT, PARAMS)[0].outputs[0].token_ids)
    return tokens


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)
