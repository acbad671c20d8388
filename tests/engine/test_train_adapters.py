"""LoRA adapters are merged into what is published and saved; checked against PEFT's own merge."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rlix.engine.parallel import NeedParallel
from rlix.engine.train import checkpoint
from rlix.engine.train.adapters import exported, tensors_of
from rlix.engine.train.engine import TrainEngine
from rlix.engine.train.materialize import Checkpoint, ModuleSpec, build_module
from rlix.engine.weights import publication
from rlix.nn import BaseTrainModule
from tests.engine import models
from tests.engine.models import qwen
from tests.engine.training_models import LoraPolicy, batch

CPU = torch.device("cpu")


class Wrapped(BaseTrainModule):
    """A module around a PEFT model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["v_proj", "embed_tokens"])
        self.inner = peft.get_peft_model(Qwen2ForCausalLM(qwen()), config)
        for name, parameter in self.inner.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)

    def export_name(self, name: str) -> str:
        return name.removeprefix("inner.")


def test_a_wrapped_model_publishes_what_peft_merges() -> None:
    module = Wrapped()
    shown = dict(tensors_of(exported(module)))
    merged = module.inner.merge_and_unload().state_dict()
    assert shown.keys() == merged.keys()
    assert all(torch.equal(shown[name], tensor) for name, tensor in merged.items())


def test_adapters_begin_as_nothing_on_base_weights_and_saving_merges_them(tmp_path: Path) -> None:
    base = models.model(7)
    base.save_pretrained(tmp_path / "base")
    module = build_module(ModuleSpec(LoraPolicy, (qwen(),), weights_path=str(tmp_path / "base")), CPU, None)
    assert isinstance(module, LoraPolicy)
    module.on_weights_materialized()
    assert all(torch.equal(dict(tensors_of(exported(module)))[name], t) for name, t in base.state_dict().items())
    for step in range(3):
        module.train_step(batch(step))
    checkpoint.save_weights(module, tmp_path / "merged", None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor(batch(9))
    assert torch.allclose(plain(ids).logits, module(ids).logits, atol=1e-5)
    assert not torch.allclose(plain(ids).logits, base(ids).logits, atol=1e-2)
    # Into the trained module: its adapters, which are merged by now, begin as nothing again.
    Checkpoint.in_folder(tmp_path / "merged", module).refill(seed=0)
    shown = dict(tensors_of(exported(module)))
    assert all(torch.equal(shown[name], tensor) for name, tensor in plain.state_dict().items())
    Checkpoint.of_tensors(base.state_dict(), module).refill(seed=0)
    shown = dict(tensors_of(exported(module)))
    assert all(torch.equal(shown[name], tensor) for name, tensor in base.state_dict().items())


def test_adapters_that_change_more_than_the_weight_are_refused() -> None:
    module = BaseTrainModule()
    module.inner = peft.get_peft_model(
        Qwen2ForCausalLM(qwen()), peft.LoraConfig(use_dora=True, target_modules=["v_proj"])
    )
    with pytest.raises(NotImplementedError, match="plain LoRA"):
        dict(tensors_of(exported(module)))


@pytest.mark.ray
def test_sharded_adapters_publish_base_names(ray_session: Any) -> None:
    alone = build_module(ModuleSpec(LoraPolicy, (qwen(),), seed=5), CPU, None)
    assert isinstance(alone, LoraPolicy)
    alone.on_weights_materialized()
    with TrainEngine((LoraPolicy, qwen())).build(tensor_parallel_size=2, seed=5) as engine:
        for step in range(2):
            loss = engine.train_step(NeedParallel(batch(step)))["loss"]
            assert loss == pytest.approx(alone.train_step(batch(step))["loss"], rel=1e-5)
        target = Qwen2ForCausalLM(qwen())
        publication.apply(target, engine.publish())
    for name, tensor in tensors_of(exported(alone)):
        assert torch.allclose(target.state_dict()[name], tensor, atol=1e-5), name
