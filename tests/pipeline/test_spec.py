import datetime
import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rlix.pipeline.models import local_model
from rlix.pipeline.spec.job import JobSpec, check_jobs, load_job, load_jobs, shipped_jobs
from rlix.pipeline.spec.model import PretrainedModel, TinyModel
from rlix.protocol.errors import SpecError

VALID = """\
name: job
steps: 10
source:
  task: sort_digits
rollout:
  max_new_tokens: 5
clusters:
  actor_train: {devices: [0, 1]}
  actor_infer: {devices: [0, 1, 2, 3], tensor_parallel: 2}
"""


ALIASES = "a0: &a0 [1, 1, 1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 5)}]\n" for i in range(1, 12))


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def failure(folder: Path, text: str) -> list[str]:
    """The lines of the error, without the folder in front of the file."""
    with pytest.raises(SpecError) as caught:
        load_job(write(folder, text))
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def with_keys(**changes: Any) -> str:
    return yaml.safe_dump({key: value for key, value in (yaml.safe_load(VALID) | changes).items() if value is not None})


class TestGood:
    def test_defaults(self, tmp_path: Path) -> None:
        spec = load_job(write(tmp_path, VALID))
        assert spec.model == TinyModel()
        assert spec.trajectories_per_step == 256
        assert [name for name, _ in spec.clusters.items()] == ["actor_train", "actor_infer"]
        assert spec.clusters.actor_infer.devices == (0, 1, 2, 3)

    def test_sizes_instead_of_devices(self, tmp_path: Path) -> None:
        spec = load_job(write(tmp_path, with_keys(clusters={"actor_train": {"gpus": 2}, "actor_infer": {"gpus": 4}})))
        assert [(c.mapping, c.count, c.field) for _, c in spec.clusters.items()] == [(2, 2, "gpus"), (4, 4, "gpus")]
        assert load_job(write(tmp_path, spec.to_yaml(), "again.yaml")) == spec
        assert "null" not in spec.to_yaml()

    def test_what_is_left_out_has_a_sensible_default(self, tmp_path: Path) -> None:
        changes: dict[str, Any] = {
            "algorithm": {"name": "ppo", "options": {"kl_coefficient": 0.1}},
            "clusters": {"actor_train": {"gpus": 2, "shards": 2}},
        }
        spec = load_job(write(tmp_path, with_keys(**changes)))
        assert {name: (c.mapping, c.unit) for name, c in spec.clusters_in_use.items()} == {
            "actor_train": (2, 2),
            "actor_infer": (None, 1),  # the whole pool
            "critic": (2, 2),
            "reference": (2, 2),
        }
        spec.check_devices(range(2))
        changes["clusters"]["critic"] = {"devices": [3]}
        spec = load_job(write(tmp_path, with_keys(**changes)))
        assert spec.clusters_in_use["critic"].mapping == [3]
        assert list(load_job(write(tmp_path, VALID)).clusters_in_use) == ["actor_train", "actor_infer"]

    @pytest.mark.parametrize(("given", "shards"), [({}, 8), ({"shards": 2}, 2), ({"tensor_parallel": 4}, 4)], ids=str)
    def test_a_trainer_holds_one_copy_unless_told_otherwise(
        self, tmp_path: Path, given: dict[str, int], shards: int
    ) -> None:
        spec = load_job(write(tmp_path, with_keys(clusters={"actor_train": {"gpus": 8, **given}})))
        assert spec.clusters.actor_train.copy_of(8) == shards
        assert load_job(write(tmp_path, spec.to_yaml(), "again.yaml")) == spec

    @pytest.mark.parametrize("spelling", ["4-8", "4 - 8", {"min": 4, "max": 8}])
    def test_a_range_in_a_pipeline_of_ones_own(self, tmp_path: Path, spelling: Any) -> None:
        clusters = {"actor_train": {"gpus": spelling, "tensor_parallel": 2}}
        spec = load_job(write(tmp_path, with_keys(pipeline="rlix.pipeline:Trainer", clusters=clusters)))
        cluster = spec.clusters.actor_train
        assert (cluster.mapping, cluster.count, cluster.least) == ({"min": 4, "max": 8}, 8, 4)
        assert load_job(write(tmp_path, spec.to_yaml(), "again.yaml")) == spec
        clusters = {"actor_train": {"gpus": "4-4"}}
        assert load_job(write(tmp_path, with_keys(clusters=clusters))).clusters.actor_train.mapping == 4

    def test_exponents_are_numbers(self, tmp_path: Path) -> None:
        spec = load_job(
            write(tmp_path, VALID + "optimizer: {learning_rate: 5e-4}\nwarmup: {steps: 1, learning_rate: 1E-3}\n")
        )
        assert spec.optimizer.learning_rate == 5e-4
        assert spec.warmup is not None
        assert spec.warmup.learning_rate == 1e-3

    @pytest.mark.parametrize("name", shipped_jobs())
    def test_shipped_jobs_load_by_name_and_fit_four_devices(self, name: str) -> None:
        spec = load_job(name)
        assert spec.name == name
        spec.check_devices(range(4))

    def test_both_examples_are_shipped_and_run_together(self) -> None:
        assert {"copy_digits", "sort_digits", "multi_lora"} <= set(shipped_jobs())
        check_jobs([load_job("sort_digits"), load_job("copy_digits")], range(4))

    def test_survives_yaml_and_pickle(self, tmp_path: Path) -> None:
        spec = load_job("sort_digits")
        assert load_job(write(tmp_path, spec.to_yaml())) == spec
        assert pickle.loads(pickle.dumps(spec)) == spec

    def test_is_frozen(self) -> None:
        with pytest.raises(ValidationError):
            load_job("sort_digits").steps = 3  # type: ignore[misc]

    def test_loading_imports_neither_torch_nor_transformers(self) -> None:
        code = "import sys, rlix; rlix.load_job('sort_digits'); print({'torch', 'transformers'} & set(sys.modules))"
        assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"

    def test_a_null_answer_survives_yaml(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"question": "1>"}\n')
        text = with_keys(
            source={
                "data": {"path": "rows.jsonl", "prompt": "question", "answer": None},
                "rewards": {"name": "builtins:max", "weight": 0.5},
            },
        )
        spec = load_job(write(tmp_path, text))
        assert spec.source.data is not None
        assert spec.source.rewards[0].weight == 0.5
        assert spec.source.data.path == str(tmp_path / "rows.jsonl")
        assert load_job(write(tmp_path, spec.to_yaml(), "again.yaml")) == spec

    def test_model_paths(self, tmp_path: Path) -> None:
        (tmp_path / "llm").mkdir()
        (tmp_path / "llm" / "config.json").write_text("{}")
        (tmp_path / "llm" / "tokenizer.json").write_text("{}")
        local = load_job(write(tmp_path, with_keys(model={"path": "llm"}))).model
        assert local == PretrainedModel(path=str(tmp_path / "llm"))
        hub = load_job(write(tmp_path, with_keys(model={"path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16"}))).model
        assert isinstance(hub, PretrainedModel)
        assert (hub.path, hub.dtype) == ("Qwen/Qwen2.5-0.5B", "bfloat16")

    def test_a_quantized_model_is_refused_before_anything_starts(self, tmp_path: Path) -> None:
        (tmp_path / "llm").mkdir()
        (tmp_path / "llm" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
        (tmp_path / "llm" / "tokenizer.json").write_text("{}")
        said = rf"model.path: {tmp_path}/llm is quantized \(fp8\), and training needs plain weights: name a model of"
        with pytest.raises(SpecError, match=said):
            load_job(write(tmp_path, with_keys(model={"path": "llm"})))
        with pytest.raises(SpecError, match=said):  # as one from the hub
            local_model(str(tmp_path / "llm"))


BAD_VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "two words"}, "name", "must begin with a letter or a digit and hold letters, digits and . _ -, not"),
    ({"rollout": {"max_new_tokens": 5, "temperature": 0}}, "rollout.temperature", "evaluation.temperature may be 0"),
    ({"stepz": 5}, "stepz", "unknown key; did you mean 'steps'?"),
    ({"learning_rate": 0.1}, "learning_rate", "did you mean 'warmup.learning_rate' or 'optimizer.learning_rate'"),
    ({"rollout": {"max_new_token": 5}}, "rollout.max_new_token", "did you mean 'max_new_tokens'?"),
    ({"rollout": {}}, "rollout.max_new_tokens", "is missing and has no default (Longest completion in tokens"),
    ({"steps": None}, "steps", "is missing and has no default (Number of training steps); add it"),
    ({"steps": "ten"}, "steps", "must be a valid integer, not 'ten'"),
    ({"steps": True}, "steps", "must be a valid integer, not True"),
    ({"steps": -1}, "steps", "must be greater than 0, not -1"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"seed": 2**63}, "seed", "must be less than 9223372036854775808"),
    ({"name": "a/b"}, "name", "not 'a/b'"),
    ({"lora": {"targets": [None]}}, "lora.targets.0", "is empty, and must be a valid string"),
    ({"name": "a" * 200}, "name", f"must have at most 64 characters, not '{'a' * 75} ..."),
    ({"rollout": {"max_new_tokens": 5, "stop": ["=", ""]}}, "rollout.stop.1", "must have at least 1 character"),
    ({"schedule": {"name": "on_policy", "options": {"ahead": 1}}}, "schedule.options.ahead", "known here: none"),
    ({"model": {"dtype": "bfloat16"}}, "model.dtype", "unknown key; it goes with 'kind: pretrained'"),
    (
        {"source": {"environment": "digit_lookup"}, "rollout": {"max_new_tokens": 64}},
        "rollout.max_new_tokens",
        "64 leaves no room for a prompt in the 64 tokens of model.context",
    ),
    ({"rollout": 3}, "rollout", "must be a section with keys of its own, not 3"),
    ({"source": {"task": "sort_digit"}}, "source.task.name", "not 'sort_digit'; did you mean 'sort_digits'?"),
    ({"source": {"task": {"name": "sort_digits", "options": {"digit": 3}}}}, "source.task.options.digit", "'digits'?"),
    (
        {"source": {"task": {"name": "sort_digits", "options": {"digits": 99}}}, "model": {"context": 999}},
        "source.task.options.digits",
        "must be less than or equal to 32, not 99",
    ),
    ({"model": {"kind": "tny"}}, "model.kind", "must be 'tiny' or 'pretrained', not 'tny'; did you mean 'tiny'?"),
    ({"model": {"kind": None}}, "model.kind", "must be 'tiny' or 'pretrained', not None"),
    ({"model": {"layers": 10**9}}, "model.layers", "must be less than or equal to 128, not 1000000000"),
    ({"model": {"hidden_size": 8 * 10**30}}, "model.hidden_size", "must be less than or equal to 8192"),
    ({"model": {"hiden_size": 64}}, "model.hiden_size", "did you mean 'hidden_size'?"),
    ({"model": {"hidden_size": 60}}, "model.hidden_size", "not a multiple of 8 (twice the heads)"),
    ({"model": {"alphabet": "0123456789>>"}}, "model.alphabet", "holds '>' twice"),
    ({"model": {"alphabet": "012345678>"}}, "model.alphabet", "lacks '9'"),
    ({"model": {"context": 8}}, "model.context", "need 11; raise it"),
    ({"model": {"path": "./nowhere"}}, "model.path", "there is no folder"),
    ({"model": {"path": "a b c"}}, "model.path", "neither a folder nor a hub name"),
    ({"model": {"path": ""}}, "model.path", "'' is neither a folder nor a hub name"),
    ({"model": {"path": "~nobody-has-this-name/llm"}}, "model.path", "there is no folder"),
    ({"optimizer": {datetime.date(2020, 1, 1): 2}}, "optimizer.2020-01-01", "unknown key; known here: betas"),
    ({"lora": {"targets": [3]}}, "lora.targets.0", "must be a valid string, not 3"),
    ({"lora": {"targets": []}}, "lora.targets", "must have at least 1, not []"),
    ({"source": {"openai": {"name": "external", "options": {"a": 1}}}}, "source.openai.options", "external takes none"),
    ({"source": {"openai": "verifiers"}}, "source.openai.options.environment", "is missing: what verifiers.load_env"),
    ({"source": {"task": "sort_digits", "chat": {"system": "Sort."}}}, "source.chat", "is not used"),
    ({"source": {"environment": "digit_lookup", "chat": {"system": "?"}}}, "source.chat.system", "said by the environ"),
    ({"source": {"openai": "external", "chat": {"system": "?"}}}, "source.chat.system", "or the agent; have that say"),
    (
        {"source": {"data": {"path": "x"}, "rewards": "exact_match", "chat": {"history": "keep"}}},
        "source.chat.history",
        "is not used: prompts from data have one turn",
    ),
    (
        {"source": {"openai": "external"}, "rollout": {"max_new_tokens": 4, "spare_prompts": 1}},
        "rollout.spare_prompts",
        "is not for agents",
    ),
    ({"source": {"openai": "external"}, "warmup": {"steps": 1}}, "warmup", "of which agents have none; remove it"),
    (
        {"source": {"environment": {"name": "gym", "options": {"id": "CartPole-v1"}}}, "warmup": {"steps": 1}},
        "warmup",
        "the environment gym has no 'demonstrate' to learn from",
    ),
    (
        {"source": {"task": "tests.pipeline.own_parts:Count"}, "warmup": {"steps": 1}},
        "warmup",
        "no 'supervised' to learn",
    ),
    ({"algorithm": {"overlong_buffer": 6}}, "algorithm.overlong_buffer", "6 is more than the 5 tokens of rollout.max_"),
    ({"training": {"timeout_s": 1e10}}, "training.timeout_s", "must be less than or equal to 1000000000"),
    ({"logging": {"wandb": {"project": ""}}}, "logging.wandb.project", "must have at least 1 character"),
    (
        {"source": {"data": {"mix": [{"path": "x.jsonl"}], "prompt": "question"}, "rewards": "exact_match"}},
        "source.data.prompt",
        "is one table's; write it with those in mix",
    ),
    ({"pipeline": "mine"}, "pipeline", "must be multi_lora, file.py:name or package.module:name, not 'mine'"),
    ({"pipeline": "no_such_package:Thing"}, "pipeline.name", "module 'no_such_package' cannot be imported"),
    ({"pipeline": "math:Thing"}, "pipeline.name", "module 'math' has no 'Thing'"),
    ({"pipeline": "mine.py:Thing"}, "pipeline.name", "there is no file"),
    ({"source": None}, "source", "is missing: where samples come from"),
    ({"source": ""}, "source.name", "must be file.py:name or package.module:name, not ''"),
    ({"source": {"task": "sort_digits", "rewards": ["exact_match"]}}, "source.rewards", "brings its own reward"),
    (
        {"clusters": {"actor_train": {"gpus": 2}, "critic": {"gpus": 2}}},
        "clusters.critic",
        "grpo has no critic; remove",
    ),
    (
        {"clusters": {"actor_train": {"gpus": 2}, "reference": {"gpus": 2}}},
        "clusters.reference",
        "without a KL there is no reference model; remove this, or set algorithm.options.kl_coefficient",
    ),
    ({"training": {"attention": "flash_attention_2"}}, "training.attention", "in bfloat16, and the model in float32"),
    ({"lora": {"targets": "q_porj"}}, "lora.targets", "has no linear layer 'q_porj'; did you mean 'q_proj'?"),
    (
        {"pipeline": "multi_lora", "runs": {"a": {}, "b": {"lora": {"targets": ["all-linear", "q_proj"]}}}},
        "runs.b.lora.targets",
        "has no linear layer 'all-linear' (it has down_proj, ",
    ),
    (
        {"algorithm": {"minibatches": 3}},
        "rollout.prompts_per_step",
        "use a multiple of 3 prompts (3 × 8 samples are 4 for each), or another",
    ),
    (
        {"clusters": {"actor_train": {"gpus": 20}}},
        "rollout.prompts_per_step",
        "20 training devices (clusters.actor_train.gpus); use a multiple of 5 prompts (5 × 8 samples are 2 for each), ",
    ),
    ({"rollout": {"max_new_tokens": 4}}, "rollout.max_new_tokens", "set it to 5 or more"),
    (
        {"rollout": {"max_new_tokens": 5, "samples_per_prompt": 1}},
        "rollout.samples_per_prompt",
        "is 1, and grpo compares the samples of a prompt",
    ),
    ({"rollout": {"max_new_tokens": 5, "executor": "vllm"}}, "model.heads", "vLLM needs 32 or more"),
    ({"optimizer": {"betas": [0.9, 1.5]}}, "optimizer.betas.1", "less than 1, not 1.5"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas.1", "is missing and has no default; add it"),
    ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate", "finite number"),
    ({"warmup": {"steps": 3, "batch_size": 63}}, "warmup.batch_size", "use a multiple of 2"),
    ({"source": {"data": {"path": "x.jsonl"}, "rewards": "exact_match"}}, "source.data.path", "there is no file"),
    ({"source": {"data": {"path": "x.jsonl"}}}, "source.rewards", "need one; add e.g. 'rewards: [exact_match]'"),
    ({"source": {"data": {"path": "x"}, "rewards": ["exact"]}}, "source.rewards.0.name", "did you mean 'exact_match'?"),
    (
        {"source": {"data": {"path": "x", "answer": None}, "rewards": ["exact_match"]}},
        "source.data.answer",
        "the reward exact_match compares with an answer",
    ),
    ({"task": {"name": "sort_digits"}}, "task", "is part of 'source' now; write 'source: {task: "),
    ({"asynchronous": {"max_staleness": 1}}, "asynchronous", "write 'schedule: {name: ahead, options: {max_staleness"),
    ({"schedule": {"max_staleness": 1}}, "schedule.max_staleness", "written under 'options'"),
    ({"critic": {"clip": 0.1}}, "critic", "is an option of ppo now"),
    (
        {
            "pipeline": "multi_lora",
            "runs": {"a": {}, "b": {"source": {"data": {"path": "x.jsonl"}, "rewards": "exact_match"}}},
        },
        "runs.b.source.data.path",
        "there is no file",
    ),
    ({"pipeline": "multi_lora", "runs": {"a": {"warmup": {}}}}, "runs.a.warmup", "'warmup' of the job as a whole"),
    (
        {"pipeline": "multi_lora", "runs": {"a": {"rollout": {"executor": "vllm"}}}},
        "runs.a.rollout.executor",
        "is one for all runs",
    ),
    ({"pipeline": "multi_lora", "runs": {"a": {"lora": {"path": "no"}}}}, "runs.a.lora.path", "no PEFT adapter"),
    ({"algorithm": {"clip_high": 0.3}}, "algorithm.clip_high", "write it under 'algorithm.options'"),
    ({"clusters": {"actor_train": {"gpus": 10**12}}}, "rollout.prompts_per_step", "do not divide among 1000000000000"),
    ({"pipeline": "full_finetune"}, "pipeline", "must be multi_lora, file.py:name or package.module:name, not"),
]


BETWEEN = {"algorithm", "schedule", "evaluation", "optimizer", "clusters", "lora", "warmup", "training"}
"""Sections whose mistakes show in the spec alone."""


class TestBad:
    @pytest.mark.parametrize(
        ("changes", "field", "message"), BAD_VALUES, ids=[f"{f}-{m[:24]}" for _, f, m in BAD_VALUES]
    )
    def test_one_line_names_file_field_and_fix(
        self, tmp_path: Path, changes: dict[str, Any], field: str, message: str
    ) -> None:
        lines = failure(tmp_path, with_keys(**changes))
        matching = [line for line in lines if re.match(rf"job\.yaml(:\d+)?: {re.escape(field)}: ", line)]
        assert len(matching) == 1, lines
        assert message in matching[0]

    @pytest.mark.parametrize("changes", [changes for changes, _, _ in BAD_VALUES if changes.keys() <= BETWEEN], ids=str)
    def test_mistakes_between_sections_come_with_those_within_another(
        self, tmp_path: Path, changes: dict[str, Any]
    ) -> None:
        alone = failure(tmp_path, with_keys(**changes))
        both = failure(tmp_path, with_keys(**changes, logging={"s": 1}))
        own = {line.partition(": ")[2] for line in both} - {line.partition(": ")[2] for line in alone}
        assert own == {"logging.s: unknown key; known here: mlflow, samples, samples_every, wandb"}
        assert len(both) == len(alone) + 1

    def test_what_may_follow_from_a_mistake_is_not_said(self, tmp_path: Path) -> None:
        rollout = {
            "prompts_per_step": 5,
            "max_new_tokens": 5,
            "samples_per_prompt": "3",
        }  # which the minibatches divide
        (found,) = failure(tmp_path, with_keys(rollout=rollout, algorithm={"name": "grpo", "minibatches": 5}))
        assert "rollout.samples_per_prompt" in found

    def test_a_misspelt_key_is_one_mistake(self, tmp_path: Path) -> None:
        rollout = {"prompts_per_step": 4, "max_new_token": 5}
        assert failure(tmp_path, with_keys(steps=None, stepz=5, rollout=rollout)) == [
            "job.yaml:15: rollout.max_new_token: unknown key; did you mean 'max_new_tokens'?",
            "job.yaml:19: stepz: unknown key; did you mean 'steps'?",
        ]

    @pytest.mark.parametrize(
        ("cluster", "message"),
        [
            (
                {"devices": [0, 1, 2], "tensor_parallel": 2},
                "tensor_parallel: 2 does not divide the 3 devices [0, 1, 2]; use a divisor of 3",
            ),
            ({"devices": [0, 1, 1]}, "device 1 is listed twice"),
            ({"devices": []}, "is empty; list at least one device"),
            ({"devices": [-1]}, "greater than or equal to 0, not -1"),
            ({"devices": 4}, "must be a list, not 4"),
            ({"devices": [0], "gpus": 1}, "gives both gpus (how many) and devices (which ones); keep one"),
            ({"gpus": 3, "tensor_parallel": 2}, "tensor_parallel: 2 does not divide the 3 devices; use a divisor of 3"),
            ({"gpus": 0}, "gpus: must be a number of devices such as 8, or a range such as {min: 4, max: 8}"),
            ({"gpus": -1}, "or 4-8, not -1"),
            ({"gpus": True}, "or 4-8, not True"),
            ({"gpus": [0, 1]}, "or 4-8, not [0, 1]"),
            ({"gpus": "four"}, "or 4-8, not 'four'"),
            ({"gpus": {"min": 4}}, "or 4-8, not {'min': 4}"),
            ({"gpus": "8-4"}, "gpus: min 8 is more than max 4; exchange them"),
            ({"gpus": "4-8"}, "gpus: rollouts grow and shrink by themselves; give the most they may use: 'gpus: 8'"),
            ({"devices": ["gpu0"]}, "valid integer, not 'gpu0'"),
        ],
    )
    def test_clusters(self, tmp_path: Path, cluster: dict[str, Any], message: str) -> None:
        clusters = {"actor_train": {"devices": [0]}, "actor_infer": cluster}
        (line,) = failure(tmp_path, with_keys(clusters=clusters))
        assert "clusters.actor_infer" in line
        assert message in line

    def test_every_problem_gets_its_line_of_the_file(self, tmp_path: Path) -> None:
        text = VALID.replace("steps: 10", "steps: many").replace(
            "  max_new_tokens: 5", "  max_new_tokens: 5\n  topp: 1"
        )
        assert failure(tmp_path, text) == [
            "job.yaml:2: steps: must be a valid integer, not 'many'",
            "job.yaml:7: rollout.topp: unknown key; did you mean 'top_p'?",
        ]

    def test_a_range_needs_a_pipeline_that_can_move(self, tmp_path: Path) -> None:
        (line,) = failure(tmp_path, with_keys(clusters={"actor_train": {"gpus": {"min": 2, "max": 4}}}))
        assert re.match(r"job\.yaml:\d+: clusters\.actor_train\.gpus: 2-4 is a range, but this job", line)
        assert "give one number, e.g. 'gpus: 4' (a range is for a pipeline of your own" in line
        own = "rlix.pipeline:Trainer"
        text = with_keys(pipeline=own, clusters={"actor_train": {"gpus": "5-7", "tensor_parallel": 4}})
        assert "no multiple of shards 4 lies from 5 to 7" in failure(tmp_path, text)[0]

    def test_sequences_over_devices(self, tmp_path: Path) -> None:
        def said(**train: int) -> str:
            return " ".join(failure(tmp_path, with_keys(clusters={"actor_train": train})))

        assert "clusters.actor_train.sequence_parallel: 2 does not divide the 3 devices; use a" in said(
            gpus=3, sequence_parallel=2
        )
        assert "3 does not divide the model's" in said(gpus=3, sequence_parallel=3)
        assert "is for a number of devices that is given" in said(sequence_parallel=2)
        job = {"actor_train": {"gpus": 2, "sequence_parallel": 2}}
        spec = load_job(write(tmp_path, with_keys(clusters=job)), range(8))
        assert spec.clusters.actor_train.on(gpus=4).sequence_parallel == 2

    def test_clusters_that_say_nothing(self, tmp_path: Path) -> None:
        clusters: dict[str, Any] = {"actor_train": {"tensor_parallel": 2}, "critic": {}}
        train, critic = failure(tmp_path, with_keys(algorithm="ppo", clusters=clusters))
        assert "clusters.actor_train: says neither how many devices nor which; add e.g. 'gpus: 2'" in train
        assert "clusters.critic: says neither" in critic
        (line,) = failure(tmp_path, with_keys(clusters=None))
        assert line.startswith("job.yaml: clusters.actor_train: says neither")
        assert "plan: auto" in line

    def test_a_pool_that_is_too_small_is_said_with_the_other_mistakes(self, tmp_path: Path) -> None:
        path = write(tmp_path, with_keys(clusters={"actor_train": {"gpus": 20}}))
        with pytest.raises(SpecError, match=r"^\S+: clusters\.actor_train\.gpus: needs 20 devices, and the pool has 8"):
            load_job(path, range(8))
        with pytest.raises(SpecError, match=r"^\S+: rollout.prompts_per_step: "):
            load_job(path, range(20))

    def test_a_missing_cluster(self, tmp_path: Path) -> None:
        (line,) = failure(tmp_path, with_keys(clusters={"actor_infer": {"devices": [0]}}))
        assert ": clusters.actor_train: says neither" in line

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("name: a\n  steps: 3\n", "job.yaml:2:8: not valid YAML: mapping values are not allowed here"),
            ("name: [a\n", "job.yaml:2:1: not valid YAML"),
            ("name: a\n\tsteps: 3\n", "not valid YAML"),
            ("", "job.yaml: is empty; a job spec is a mapping of keys such as 'name: my_job'"),
            ("- a\n- b\n", "job.yaml: is a list; a job spec is a mapping of keys such as 'name: my_job'"),
            ("name: a\nsteps: 1\nname: b\n", "job.yaml:3: name: given twice, first on line 1; keep one"),
            ("a: !!python/object:os.system {}\n", "not valid YAML: could not determine a constructor"),
            ("name: &a [*a]\n", "not valid YAML: nested too deeply, or an alias is part of itself"),
            (ALIASES, "holds 320,434,579 values with its aliases (*name) written out; write fewer"),
            ("name: a\nsteps: \x07\n", "job.yaml:2: not valid YAML: holds the character '\\x07'"),
        ],
    )
    def test_files_that_are_not_a_mapping(self, tmp_path: Path, text: str, message: str) -> None:
        (line,) = failure(tmp_path, text)
        assert message in line

    def test_a_file_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(
            SpecError, match=r"no such file.*copy_digits, multi_lora, sort.*did you mean 'sort_digits'\?"
        ):
            load_job("sort_digit")
        write(tmp_path, VALID, "mine.yaml")
        with pytest.raises(SpecError, match=r"did you mean '.*mine\.yaml'\?"):
            load_job(tmp_path / "mien.yaml")
        write(tmp_path, "name: a\npool: {gpus: 8}\n", "cluster.yaml")
        with pytest.raises(SpecError) as none_near:
            load_job(tmp_path / "clusters.yaml")
        assert "cluster.yaml'" not in str(none_near.value)
        with pytest.raises(SpecError, match="is a folder; name the job's YAML file in it"):
            load_job(tmp_path)

    def test_a_name_that_no_file_can_have(self, tmp_path: Path) -> None:
        (line,) = failure(tmp_path, with_keys(model={"path": "/" + "x" * 300}))
        assert re.fullmatch(r"job\.yaml: cannot look at /x+: File name too long", line)
        with pytest.raises(SpecError, match=r"cannot look at x+: File name too long"):
            load_job("x" * 300)

    def test_a_file_that_is_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(SpecError, match="not a text file"):
            load_job(tmp_path / "job.yaml")


class TestPool:
    def test_devices_that_do_not_exist(self, tmp_path: Path) -> None:
        spec = load_job(write(tmp_path, VALID))
        spec.check_devices(range(4))
        with pytest.raises(SpecError) as caught:
            spec.check_devices([0, 1, 5])
        assert str(caught.value) == (
            f"{tmp_path}/job.yaml:9: clusters.actor_infer.devices: device 2 does not exist: the pool has devices 0-1, "
            "5; list those, let RLix choose with 'gpus: 4', or run on a larger pool (without GPUs: --gpus N makes N "
            "virtual ones)"
        )
        with pytest.raises(SpecError, match="RLIX_VIRTUAL_GPUS"):
            spec.check_devices([])

    @pytest.mark.parametrize(
        ("cluster", "message"),
        [
            ({"gpus": 9}, "clusters.actor_infer.gpus: needs 9 devices, and the pool has 8; ask for fewer, or run on"),
            ({"gpus": 99999999}, "clusters.actor_infer.gpus: needs 99999999 devices, and the pool has 8"),
            ({"devices": [0, 9]}, "clusters.actor_infer.devices: device 9 does not exist: the pool has devices 0-7"),
            ({"devices": [99999999]}, "device 99999999 does not exist"),
            ({"tensor_parallel": 16}, "clusters.actor_infer.gpus: needs 16 devices"),
        ],
    )
    def test_more_than_the_pool_has(self, tmp_path: Path, cluster: dict[str, Any], message: str) -> None:
        spec = load_job(write(tmp_path, with_keys(clusters={"actor_train": {"gpus": 2}, "actor_infer": cluster})))
        with pytest.raises(SpecError) as caught:
            check_jobs([spec], range(8))
        (line,) = str(caught.value).splitlines()
        assert message in line

    def test_a_replica_larger_than_a_node(self, tmp_path: Path) -> None:
        clusters = {"actor_train": {"gpus": 4, "tensor_parallel": 4}, "actor_infer": {"gpus": 4, "tensor_parallel": 4}}
        spec = load_job(write(tmp_path, with_keys(clusters=clusters)))
        check_jobs([spec], range(8), nodes=(4, 4))
        with pytest.raises(SpecError) as caught:
            check_jobs([spec], range(8), nodes=(3, 3, 2))
        (line,) = str(caught.value).splitlines()
        assert "clusters.actor_infer.tensor_parallel: the devices of a replica must be on one node, and" in line

    def test_vllm_takes_whole_nodes_where_a_replica_is_larger(self, tmp_path: Path) -> None:
        def check(nodes: tuple[int, ...], infer: dict[str, Any]) -> None:
            clusters = {"actor_train": {"gpus": 4}, "actor_infer": {"tensor_parallel": 4, **infer}}
            rollout = {"max_new_tokens": 5, "executor": "vllm"}
            text = with_keys(clusters=clusters, rollout=rollout, model={"hidden_size": 128})
            check_jobs([load_job(write(tmp_path, text))], range(8), nodes=nodes)

        check((2, 2, 2, 2), {"gpus": 8})
        for nodes in ((3, 3, 2), (3, 3)):
            with pytest.raises(SpecError, match=r"takes whole nodes of one size, and the pool's have 3, 3"):
                check(nodes, {"gpus": 4})
            check(nodes, {"devices": [0, 1, 3, 4]})

    def test_two_jobs_of_one_name(self, tmp_path: Path) -> None:
        first = load_job(write(tmp_path, VALID, "a.yaml"))
        second = load_job(write(tmp_path, VALID, "b.yaml"))
        with pytest.raises(SpecError, match=r"b\.yaml:1: name: 'job' is also the name of .*a\.yaml; rename one"):
            check_jobs([first, second], range(4))

    def test_each_of_several_bad_files_is_reported(self, tmp_path: Path) -> None:
        bad = [str(write(tmp_path, VALID.replace("steps:", "stepz:"), f"{name}.yaml")) for name in "ab"]
        good = str(write(tmp_path, VALID, "c.yaml"))
        with pytest.raises(SpecError) as caught:
            load_jobs([*bad, good, good])
        said = str(caught.value).splitlines()
        assert {Path(line.partition(":")[0]).name for line in said} == {"a.yaml", "b.yaml", "c.yaml"}
        assert said[-1] == f"{good}: is given twice; name each job once"
        assert [spec.name for spec in load_jobs([good])] == ["job"]

    def test_what_virtual_gpus_cannot_do(self, tmp_path: Path) -> None:
        model = {"path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16"}
        text = with_keys(model=model, training={"attention": "flash_attention_2"})
        spec = load_job(write(tmp_path, text))
        check_jobs([spec], range(4))
        with pytest.raises(SpecError, match=r"job\.yaml:\d+: training\.attention: .* GPUs, and these are virtual ones"):
            check_jobs([spec], range(4), virtual=True)
        with pytest.raises(SpecError, match="needs the package flash-attn"):
            check_jobs([spec], range(4), virtual=False)

    def test_specs_made_in_python_are_checked_too(self) -> None:
        values = yaml.safe_load(VALID)
        spec = JobSpec(**values)
        with pytest.raises(SpecError, match=r"^clusters\.actor_train\.devices: device 1"):
            spec.check_devices([0])
        with pytest.raises(ValidationError, match=r"rollout\.max_new_tokens: is 2"):
            JobSpec(**(values | {"rollout": {"max_new_tokens": 2}}))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(SpecError, match=r"pipe\.yaml: is no regular file"):
        load_job(tmp_path / "pipe.yaml")
