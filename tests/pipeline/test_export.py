"""From a checkpoint to a folder that plain transformers loads, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
from typer.testing import CliRunner

from rlix.cli.main import app
from rlix.engine.train import checkpoint
from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.node.manifest import write_manifest
from rlix.pipeline.jobs.export import export
from rlix.pipeline.models import describe_model
from rlix.pipeline.spec.training import OptimizerSpec
from rlix.pipeline.tokenizer import character_tokenizer
from rlix.pipeline.training.policy import policy_on_meta
from rlix.protocol.errors import SpecError
from tests.engine.models import qwen

TOKENIZER = character_tokenizer("0123456789>=")


def trained(folder: Path, **changes: Any) -> Any:
    """A policy that took a step, so that its state holds an optimizer's, too."""
    torch.manual_seed(1)
    Qwen2ForCausalLM(qwen(vocab_size=len(TOKENIZER), **changes)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    meta = policy_on_meta(folder)
    args, kwargs = meta.rlix_init
    spec = ModuleSpec(module_class=type(meta), args=args, kwargs=kwargs, weights_path=str(folder))
    module: Any = build_module(spec, torch.device("cpu"), None)
    module.configure_optimizer(OptimizerSpec(learning_rate=1e-2))
    batch = {"input_ids": torch.tensor([[1, 4, 5, 6]]), "mask": torch.ones(1, 3)}
    module.supervised_step(batch, 3.0, 1e-2, 1.0)
    module.finish_warmup()
    return module


def run_of(folder: Path, model: Path, module: Any, *steps: int, dtype: str = "float32") -> Path:
    for step in steps:
        target = folder / "checkpoints" / f"step_{step}"
        target.mkdir(parents=True)
        checkpoint.save_state(module, target / "state")
        describe_model(model, target / "model", dtype)
        write_manifest(target)
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_plain_transformers_loads_what_was_trained(tied: bool, tmp_path: Path) -> None:
    module = trained(tmp_path / "model", tie_word_embeddings=tied)
    run = run_of(tmp_path / "run", tmp_path / "model", module, 3)
    out, source = export(run, tmp_path / "out")
    assert source.name == "step_3"
    plain = AutoModelForCausalLM.from_pretrained(out)
    wanted = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in plain.state_dict().items())
    assert not torch.equal(
        plain.state_dict()["model.embed_tokens.weight"],
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()["model.embed_tokens.weight"],
    )
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode("417>") == TOKENIZER.encode("417>")
    assert type(plain).__name__ == "Qwen2ForCausalLM"
    assert not [name for name in (path.name for path in tmp_path.iterdir()) if name.endswith(".partial")]


def test_it_is_of_the_type_that_rollouts_held_or_another(tmp_path: Path) -> None:
    module = trained(tmp_path / "model")
    run = run_of(tmp_path / "run", tmp_path / "model", module, 1, dtype="bfloat16")
    for out, dtype in ((tmp_path / "as_held", None), (tmp_path / "wide", "float32")):
        export(run, out, dtype=dtype)
        plain = AutoModelForCausalLM.from_pretrained(out)
        assert str(plain.dtype) == f"torch.{dtype or 'bfloat16'}"
        weight = plain.state_dict()["lm_head.weight"]
        assert torch.equal(weight, module.state_dict()["lm_head.weight"].to(weight.dtype))


def test_the_command_and_its_mistakes(tmp_path: Path) -> None:
    module = trained(tmp_path / "model")
    run = run_of(tmp_path / "run", tmp_path / "model", module, 1, 2)
    (run / "checkpoints" / "step_2" / "state" / "state.json").write_text("")

    def command(*more: str) -> str:
        result = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), *more])
        assert "Traceback" not in result.output
        return f"{result.exit_code} {' '.join(result.output.split())}"

    assert "step_2: is broken (state/state.json has 0 of" in command("--step", "2")
    assert "no checkpoint of step 7; there are 1, 2" in command("--step", "7")
    assert "no checkpoint is marked as the best" in command("--step", "best")
    assert "--step newest: must be" in command("--step", "newest")
    assert "--dtype int8: must be" in command("--dtype", "int8")
    (run / "checkpoints" / "best").symlink_to("step_1")
    assert command("--step", "best").startswith("0 step_1 of")
    assert command("--step", "1").startswith("2 ")  # it exists already
    assert export(run, tmp_path / "newest")[1].name == "step_1"  # that is whole
    with pytest.raises(SpecError, match="has no checkpoint; give a run folder"):
        export(tmp_path, tmp_path / "other")
    missing = CliRunner().invoke(app, ["export", str(tmp_path / "none"), str(tmp_path / "other")])
    assert (missing.exit_code, "none: there is no such folder" in " ".join(missing.output.split())) == (2, True)


def test_a_state_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    module = trained(tmp_path / "model")
    Qwen2ForCausalLM(qwen(num_hidden_layers=3)).save_pretrained(tmp_path / "deeper")
    TOKENIZER.save_pretrained(tmp_path / "deeper")
    run = run_of(tmp_path / "run", tmp_path / "deeper", module, 1)
    with pytest.raises(SpecError, match=r"weights are not those of a Qwen2ForCausalLM: model\.layers\.2"):
        export(run, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_of_an_adapter_it_is_the_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_1" / "adapter"
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.json"):
        (folder / name).write_text(name)
    write_manifest(folder.parent)
    with pytest.raises(SpecError, match="leave out --dtype"):
        export(tmp_path / "run", tmp_path / "out", dtype="float32")
    out, _ = export(tmp_path / "run", tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
