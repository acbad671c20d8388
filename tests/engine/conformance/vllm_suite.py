"""What RLix relies on in vLLM; run beside the suite of the contract, in the process that has vLLM imported."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from rlix.engine.executors import vllm, vllm_abi, vllm_options, vllm_worker
from rlix.engine.executors.base import ExecutorOptions
from rlix.engine.inference.requests import GenerationRequest
from rlix.protocol.errors import RlixError


def test_a_vllm_without_what_rlix_relies_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_abi.check()
    monkeypatch.delattr(LLMEngine, "is_sleeping")
    monkeypatch.setattr(LLMEngine, "abort_request", lambda self, request_ids: None)
    monkeypatch.delattr(GPUModelRunner, "get_model")
    lacks = r"LLMEngine\.abort_request\(internal\); LLMEngine\.is_sleeping\(\); GPUModelRunner \(V2\)\.get_model\(\)"
    with pytest.raises(RlixError, match=f"does not have what RLix relies on: {lacks}"):
        vllm_abi.check()


def test_options_are_known_and_those_of_build_refused() -> None:
    assert vllm_options.known() == tuple(field.name for field in dataclasses.fields(EngineArgs))
    assert set(vllm_options.known() or ()) >= vllm_options.OURS
    vllm_abi.check_options({"block_size": 16})
    with pytest.raises(ValueError, match="'max_num_seqs' is an argument of build"):
        vllm_abi.check_options({"max_num_seqs": 16})


def test_what_vllm_warns_of_while_it_replaces_weights_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    class Rotary(torch.nn.Module):
        """Has computed what it has."""

    theirs = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    with vllm_worker._warnings_shown(torch.nn.Sequential(torch.nn.Linear(2, 2), Rotary())):
        for layer in ("Rotary", "Linear"):
            theirs.warning("%s: Failed to load weights", layer)
    ours = [record.getMessage() for record in caplog.records if record.name == vllm_worker.__name__]
    assert ours == ["vLLM, while it replaced weights: Linear: Failed to load weights"]


class EndsAllAtOnce:
    """In place of vLLM's engine. What came last is told first."""

    vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization=None, dtype=torch.float32))

    def __init__(self) -> None:
        self.open: list[str] = []

    def add_request(self, id: str, prompt: Any, params: Any, lora_request: Any = None) -> str:
        self.open.insert(0, id)
        return id

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> list[Any]:
        ended, self.open = self.open, []
        return [self.output(id) for id in ended]

    def output(self, id: str) -> Any:
        row = SimpleNamespace(logprob=-1.0)
        answer = SimpleNamespace(token_ids=[9, 8], logprobs=[{9: row}, {8: row}], finish_reason="stop")
        return SimpleNamespace(request_id=id, outputs=[answer], finished=True, prompt_logprobs=[None, {5: row}])


def test_what_ends_while_known_tokens_are_asked_for_is_not_lost() -> None:
    executor: Any = object.__new__(vllm.VllmExecutor)
    executor._engine, executor._options, executor._max_length = EndsAllAtOnce(), ExecutorOptions(max_num_seqs=4), 64
    executor._running, executor._ended, executor._adapters = {}, {}, {}
    executor._life = SimpleNamespace(version=4)
    requests = [GenerationRequest(f"r{key}", (1, 2), max_new_tokens=2, temperature=0.0) for key in range(2)]
    for key, request in enumerate(requests):
        executor._start(key, request)
    assert executor._score((3, 5)) == ([-1.0], "float32")
    cancelled = executor._cancel(0, requests[0])  # before the next step tells that it has ended
    assert (cancelled.finish_reason, cancelled.token_ids) == ("stop", (9, 8))
    assert {key: result.token_ids for key, result in executor._step().items()} == {1: (9, 8)}
    assert executor._step() == {}
