"""Each kind of model is loaded, trained, published and saved; its log-probabilities are transformers' own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import rlix.nn
from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions, Site
from rlix.engine.executors.transformers import TransformersExecutor
from rlix.engine.model_source import ModelSource
from rlix.engine.train.checkpoint import save_weights
from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.engine.weights import publication
from rlix.protocol.errors import WeightSyncError
from rlix.protocol.messages import DeviceKind
from tests.engine.models import VOCABULARY, published

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 32},
    "gemma3_text": {"sliding_window": 32},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": _EXPERTS,
    "deepseek_v3": {**_EXPERTS, **_LATENT, **_ROUTED, "num_key_value_heads": 4, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])


def made(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SIZES, **KINDS[kind]}))
    return model.eval()


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=TOKENS).logits.log_softmax(-1)
    return found


def policy(kind: str) -> tuple[type[rlix.nn.BaseTrainModule], Any]:
    model = made(kind)
    return type("Policy", (rlix.nn.HuggingFaceFsdp2TrainModule, type(model)), {}), model.config


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_loaded_trained_published_and_saved(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    made(kind).save_pretrained(folder)
    module_class, config = policy(kind)
    module: Any = build_module(ModuleSpec(module_class, (config,), weights_path=str(folder)), torch.device("cpu"))
    assert torch.allclose(logprobs(module), logprobs(AutoModelForCausalLM.from_pretrained(folder)), atol=1e-5)

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = module(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    save_weights(module, tmp_path / "saved", None)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.allclose(logprobs(module), logprobs(trained), atol=1e-5)
    replica = AutoModelForCausalLM.from_pretrained(folder)
    publication.apply(replica, published(module, version=1))
    assert torch.allclose(logprobs(module), logprobs(replica), atol=1e-5)


def test_quantized_weights_are_not_trained(tmp_path: Path) -> None:
    model = made("qwen3")
    state = {
        name: value.to(torch.float8_e4m3fn) if value.dim() > 1 else value for name, value in model.state_dict().items()
    }
    model.config.save_pretrained(tmp_path)
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightSyncError, match=r"are quantized .*name a folder of bfloat16"):
        build_module(ModuleSpec(policy("qwen3")[0], (model.config,), weights_path=str(tmp_path)), torch.device("cpu"))


def test_quantized_rollouts_take_no_published_weights(tmp_path: Path) -> None:
    model = made("qwen2")
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    executor = TransformersExecutor(ModelSource.of(model.config), ExecutorOptions(), Site(DeviceKind.CPU))
    for refuses in (
        lambda: executor.load(published(model, 1), ALL_PARTS),
        lambda: executor._check_takes(published(model, 1)),
    ):
        with pytest.raises(WeightSyncError, match=r"is quantized \(fp8\).*unquantized model"):
            refuses()
    executor.close()


def test_a_folder_that_says_beside_its_configuration_that_it_is_quantized_takes_none_either(tmp_path: Path) -> None:
    model = made("qwen2")
    model.save_pretrained(tmp_path)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(WeightSyncError, match=r"is quantized \(FP8, by hf_quant_config.json\).*unquantized model"):
        ModelSource.of(tmp_path).check_takes_published()


def test_a_checkpoint_that_lacks_an_expert_is_refused_by_its_name(tmp_path: Path) -> None:
    made("qwen3_moe").save_pretrained(tmp_path)
    module_class, config = policy("qwen3_moe")
    config.num_experts = 5
    with pytest.raises(WeightSyncError, match=r"shape of model.layers.0.mlp.experts.gate_up_proj: stored \[4, "):
        build_module(ModuleSpec(module_class, (config,), weights_path=str(tmp_path)), torch.device("cpu"))
