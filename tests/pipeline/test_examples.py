"""The large examples: as one would run them they are checked, scaled down they run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlix.cli.check import check_specs
from rlix.pipeline.memory.job import job_memory, memory_problems
from rlix.pipeline.memory.shape import shape_of
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import read_yaml
from tests.pipeline.chat_models import byte_tokenizer, qwen_7b, template
from tests.pipeline.in_process import InProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["qwen_7b_grpo", "agent_tools"]
GIB = 2**30


def small_model(folder: Path) -> Path:
    """The same architecture with random weights; its tokens are bytes, its chat template is Qwen2.5's own."""
    tokenizer = byte_tokenizer(template("qwen2_5"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def scaled_down(name: str, folder: Path, **changes: Any) -> JobSpec:
    """The example on two devices, with a small model, small data and few, short answers."""
    values, _ = read_yaml(EXAMPLES / f"{name}.yaml")
    source = values["source"]
    if "data" in source:
        for number, table in enumerate(source["data"]["mix"]):
            rows = [
                {table["prompt"]: f"{i} + {number}?", table["answer"]: f"\\boxed{{{i + number}}}"} for i in range(8)
            ]
            (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            table |= {"path": str(folder / f"{number}.jsonl"), "config": None}
    else:
        source["environment"]["name"] = str(EXAMPLES / source["environment"]["name"])
        source["environment"] |= {"max_tokens": 1600, "max_turns": 2}
    values["model"]["path"] = str(small_model(folder / "model"))
    values |= {"steps": 2, "clusters": {"actor_train": {"gpus": 1}, "actor_infer": {"gpus": 1}}}
    values["rollout"] |= {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 16, "max_num_seqs": 8}
    values["rollout"]["executor_options"] = {"max_model_len": 1600}
    values["algorithm"] |= {"minibatches": 1, "overlong_buffer": 4}
    for section, more in changes.items():
        values[section] |= more
    (folder / "job.yaml").write_text(json.dumps(values))
    return load_job(folder / "job.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_fits_the_machine_it_is_written_for(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = load_job(EXAMPLES / f"{name}.yaml")
    qwen_7b().save_pretrained(tmp_path)
    spec.check_devices(range(8))
    check_specs([str(EXAMPLES / f"{name}.yaml")], memory_gib=80, devices=8, model_config=tmp_path)
    shown = capsys.readouterr().out
    assert "actor_training" in shown
    assert f"of max_num_seqs {spec.rollout.max_num_seqs} trajectories at a time" in shown
    with pytest.raises(SpecError, match=r"actor_train: actor_training needs about \d+\.\d GiB on each device"):
        check_specs([str(EXAMPLES / f"{name}.yaml")], memory_gib=24, devices=8, model_config=tmp_path)
    found = job_memory(spec, shape_of(spec.model, tmp_path), 80 * GIB)
    assert not list(memory_problems(spec, found, 80 * GIB))
    assert found.fitting == spec.rollout.max_num_seqs or (found.fitting or 0) > 100


@pytest.mark.parametrize("name", NAMES)
def test_runs_scaled_down(name: str, tmp_path: Path) -> None:
    rows = InProcess(scaled_down(name, tmp_path), tmp_path).run_steps()
    assert len(rows) == 2
    assert all(row["trajectories"] == 4 for row in rows)
    assert "reward_failed" not in rows[0] or rows[0]["reward_failed"] == 0
    assert "env_failed" not in rows[0] or rows[0]["env_failed"] == 0
