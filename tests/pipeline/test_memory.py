import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlix.cli.check import check_specs
from rlix.pipeline.memory import estimate
from rlix.pipeline.memory.estimate import Generation, Training
from rlix.pipeline.memory.job import job_memory, memory_problems
from rlix.pipeline.memory.shape import ModelShape, counted, shape_of
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.tokenizer import character_tokenizer
from rlix.protocol.errors import SpecError
from tests.pipeline.chat_models import qwen_7b

ROOT = Path(__file__).parents[2]
GIB = 2**30
QWEN_7B = ModelShape(
    parameters=7_615_616_512,
    block=233_057_792,
    layers=28,
    hidden=3584,
    intermediate=18944,
    vocabulary=152_064,
    query=3584,
    keys=512,
    context=32768,
    linear=frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
)
SMALL = Qwen2Config(
    vocab_size=4096,
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def job(**changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "job",
        "steps": 1,
        "source": {"data": {"path": "rows.jsonl", "max_prompt_tokens": 1024}, "rewards": ["exact_match"]},
        "model": {"path": "/qwen", "dtype": "bfloat16"},
        "rollout": {"max_new_tokens": 7168, "executor": "vllm", "max_num_seqs": 256},
        "training": {"micro_batch_tokens": 16384, "activation_checkpointing": True},
        "clusters": {"actor_train": {"gpus": 8}, "actor_infer": {"gpus": 8}},
    }
    return JobSpec.model_validate(values | changes)


class TestShape:
    def test_of_a_7b_model(self) -> None:
        assert counted(qwen_7b()) == QWEN_7B
        assert QWEN_7B.rest == 2 * 152_064 * 3584 + 3584  # embeddings, head, last norm
        assert QWEN_7B.cache == 28 * 2 * 4 * 128

    def test_of_the_built_in_model(self) -> None:
        model = JobSpec.model_validate(
            {"name": "a", "steps": 1, "source": {"task": "sort_digits"}, "rollout": {"max_new_tokens": 5}}
            | {"clusters": {"actor_train": {"gpus": 1}}}
        ).model
        assert shape_of(model).context == 64


class TestFormulas:
    """By hand, for 7.6 billion parameters on 8 devices that hold one copy."""

    def test_of_what_is_trained(self) -> None:
        parts = estimate.training(QWEN_7B, Training(8, 8, 2, 16384, checkpointing=True)).parts
        own = 7_615_616_512 // 8
        assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (4 * own, 4 * own, 8 * own)

    def test_offload_is_at_its_highest_in_one_of_two_places(self) -> None:
        how = Training(8, 8, 2, 16384, checkpointing=True, offload=True)
        assert "optimizer" not in estimate.training(QWEN_7B, how).parts
        small = estimate.training(QWEN_7B, Training(1, 1, 4, 16, offload=True)).parts
        assert small == {"weights": 4 * 7_615_616_512, "gradients": 4 * 7_615_616_512, "optimizer": 8 * 7_615_616_512}

    def test_of_generation(self) -> None:
        how = Generation(width=2, dtype=2, sequences=256, longest=8192)
        need = estimate.generation(QWEN_7B, how, 8)
        assert need.parts["weights"] == 7_615_616_512
        assert need.parts["cache"] == estimate.sequence_bytes(QWEN_7B, how) == 2 * 28 * 2 * 512 * 8192 // 2
        room = int(0.9 * 40 * GIB) - need.total + need.parts["cache"]
        assert estimate.sequences_that_fit(QWEN_7B, how, 40 * GIB) == room // need.parts["cache"]
        assert estimate.sequences_that_fit(QWEN_7B, replace(how, cache_bytes=GIB), 40 * GIB) == 4

    def test_of_an_adapter(self) -> None:
        trained = estimate.adapter_parameters(QWEN_7B, 16)
        attention = 2 * (3584 + 3584) + 2 * (3584 + 512)
        assert trained == 16 * 28 * (attention + 3 * (3584 + 18944))
        for width in (1, 8):  # the model is divided, an adapter is whole everywhere
            parts = estimate.training(QWEN_7B, Training(width, width, 2, 4096, True, stored=2, trained=trained)).parts
            assert parts["weights"] == 2 * 7_615_616_512 // width + 4 * trained
            assert (parts["gradients"], parts["optimizer"]) == (4 * trained, 8 * trained)
        assert estimate.training(QWEN_7B, Training(1, 1, 2, 64, stored=2, trained=trained)).parts["gathered"] == 0

    def test_memory_does_not_grow_with_anything_but_what_goes_through_at_once(self) -> None:
        one, two = (estimate.activations(QWEN_7B, Training(8, 8, 2, tokens)) for tokens in (1000, 2000))
        assert two == 2 * one


class TestJob:
    def test_every_phase_of_a_job_is_there(self) -> None:
        found = job_memory(job(), QWEN_7B, 80 * GIB)
        assert [need.phase for need in found.needs] == ["actor_training", "weight_sync", "rollout"]
        assert found.longest == 8192
        assert 100 < (found.fitting or 0) < 256
        assert not list(memory_problems(job(), found, 80 * GIB))
        ppo = job(algorithm={"name": "ppo", "options": {"kl_coefficient": 0.1}})
        assert [need.phase for need in job_memory(ppo, QWEN_7B).needs] == [
            "actor_training",
            "old_log_probs",
            "reference_log_probs",
            "critic_training",
            "weight_sync",
            "rollout",
        ]

    def test_the_adapters_of_all_runs_are_there(self) -> None:
        runs = {"a": {"lora": {"rank": 8}}, "b": {"lora": {"rank": 24}, "rollout": {"max_new_tokens": 512}}}
        needs = job_memory(job(pipeline="multi_lora", runs=runs), QWEN_7B).needs
        assert [need.phase for need in needs] == ["actor_training", "weight_sync", "rollout"]
        trained = estimate.adapter_parameters(QWEN_7B, 32)
        assert needs[0].parts["optimizer"] == 8 * trained
        alone = job_memory(job(lora={"rank": 8}), QWEN_7B).needs
        assert needs[0].parts["activations"] == alone[0].parts["activations"]
        assert needs[0].parts["weights"] - alone[0].parts["weights"] == 4 * estimate.adapter_parameters(QWEN_7B, 24)

    def test_a_layer_that_the_model_has_not_is_found_with_its_configuration(self, tmp_path: Path) -> None:
        qwen_7b().save_pretrained(tmp_path)
        character_tokenizer("0123456789>").save_pretrained(tmp_path)
        spec = job(source={"task": "sort_digits"}, model={"path": str(tmp_path)}, pipeline="multi_lora", runs={"a": {}})
        runs = {"a": {}, "b": {"lora": {"targets": ["q_proj", "gate"]}}}
        for name, changes in (("runs.b.lora", {"runs": runs}), ("lora", {"lora": {"targets": "gate"}})):
            text = json.dumps({**spec.model_dump(mode="json", exclude_unset=True), **changes})
            (tmp_path / "job.yaml").write_text(text)
            with pytest.raises(SpecError) as caught:
                check_specs([str(tmp_path / "job.yaml")], memory_gib=80, devices=8, model_config=None)
            (line,) = str(caught.value).splitlines()
            assert f": {name}.targets: the model has no linear layer 'gate'; did you mean 'gate_proj'?" in line

    def test_each_job_whose_configuration_is_of_no_use_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 0}))
        (tmp_path / "tokenizer.json").touch()
        spec = job(source={"task": "sort_digits"}, model={"path": str(tmp_path)})
        for name in ("a", "b"):
            values = spec.model_dump(mode="json", exclude_unset=True) | {"name": name}
            (tmp_path / f"{name}.yaml").write_text(json.dumps(values))
        files = [str(tmp_path / f"{name}.yaml") for name in ("a", "b")]
        with pytest.raises(SpecError, match=r"^a: model\.path: .*positive.*\nb: model\.path: ") as caught:
            check_specs(files, memory_gib=80, devices=8, model_config=None)
        assert len(str(caught.value).splitlines()) == 2

    @pytest.mark.parametrize(
        ("changes", "cluster", "advice"),
        [
            (
                {"clusters": {"actor_train": {"gpus": 8, "shards": 1}}},
                "actor_train",
                "set clusters.actor_train.shards: 8",
            ),
            (
                {"training": {"micro_batch_tokens": 16384}},
                "actor_train",
                "set training.activation_checkpointing: true or lower training.micro_batch_tokens (16384)",
            ),
            (
                {"training": {"micro_batch_tokens": 262144, "activation_checkpointing": True}},
                "actor_train",
                "lower training.micro_batch_tokens (262144)",
            ),
            (
                {"clusters": {"actor_train": {"gpus": 1}}, "training": {"activation_checkpointing": True}},
                "actor_train",
                "set training.offload_optimizer: true or set clusters.actor_train.gpus: 2",
            ),
            (
                {"rollout": {"max_new_tokens": 7168, "executor": "vllm", "max_num_seqs": 65536}},
                "actor_infer",
                "lower rollout.max_num_seqs (65536)",
            ),
        ],
    )
    def test_what_cannot_fit_is_said_with_numbers_and_a_way_out(
        self, changes: dict[str, Any], cluster: str, advice: str
    ) -> None:
        spec = job(**changes)
        problems = list(memory_problems(spec, job_memory(spec, QWEN_7B, 80 * GIB), 80 * GIB))
        about = [problem.message for problem in problems if problem.field == f"clusters.{cluster}"]
        assert about
        assert "GiB on each device, and " in about[0]
        assert advice in about[0]

    def test_nothing_is_advised_that_saves_nothing(self) -> None:
        """The optimizer state of an adapter is nothing beside what the backward pass keeps."""
        clusters = {"actor_train": {"gpus": 1}, "actor_infer": {"gpus": 1}}
        spec = job(training={}, lora={"rank": 8}, clusters=clusters)
        problems = memory_problems(spec, job_memory(spec, QWEN_7B, 24 * GIB), 24 * GIB)
        advice = next(p.message for p in problems if "actor_training needs" in p.message).rpartition("; ")[2]
        assert advice.startswith("set training.activation_checkpointing: true or ")
        assert "offload" not in advice


def test_what_adapters_copy_into_float32() -> None:
    """What a model in bfloat16 keeps in float32 for adapters in float32, beyond those in bfloat16."""
    tokens = 64
    config = LoraConfig(r=1, target_modules="all-linear")

    def kept(wide: bool) -> int:
        torch.manual_seed(0)
        model: Any = get_peft_model(Qwen2ForCausalLM(SMALL).bfloat16(), config, autocast_adapter_dtype=wide)
        seen: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype == torch.float32 and tensor.numel() >= tokens * SMALL.hidden_size:
                seen[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other gets its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model.base_model.model.model(input_ids=torch.ones(1, tokens, dtype=torch.long)).last_hidden_state
        assert hidden.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())

    shape = counted(SMALL)
    how = Training(1, 1, 2, tokens, stored=2)
    adapted = replace(how, trained=1)
    counts = [estimate.training(shape, one).parts["activations"] for one in (how, adapted)]
    assert counts[1] - counts[0] == pytest.approx(kept(True) - kept(False), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "checkpointing"), [("micro-batches", False), ("micro-batches, checkpointing", True)])
def test_the_estimate_against_a_real_update(tmp_path: Path, case: str, checkpointing: bool) -> None:
    """Of a process that trains on one device in float32: how far its memory rises above weights, gradients, moments."""
    Qwen2ForCausalLM(SMALL).save_pretrained(tmp_path)
    command = [sys.executable, str(ROOT / "benchmarks/training_memory.py"), "--case", case, "--folder", str(tmp_path)]
    sizes = ["--rows", "16", "--length", "256", "--budget", "2048", "--vocabulary", "4096"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True, env=environment, timeout=800)
    measured = json.loads(done.stdout.splitlines()[-1])["step"]["mib"] * 2**20
    need = estimate.training(counted(SMALL), Training(1, 1, 4, 2048, checkpointing=checkpointing))
    rising = sum(need.parts[name] for name in ("gathered", "activations", "logits"))
    assert rising == pytest.approx(measured, rel=0.25)
