"""What RLix relies on in vLLM; run beside the suite of the contract, in the process that has vLLM imported."""

import dataclasses
import logging

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from rlix.engine.executors import vllm_abi, vllm_options, vllm_worker
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
