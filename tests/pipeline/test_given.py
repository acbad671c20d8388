"""Learning from conversations and preferences that are given: as a job, and as the beginning of one."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlix.cli.main import app
from rlix.pipeline.ends import Ends
from rlix.pipeline.rollout.none import NoRollouts
from rlix.pipeline.rollout.router import Sampling
from rlix.pipeline.sources.base import Surroundings
from rlix.pipeline.sources.conversations import ConversationSource
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.pipeline.spec.source import ChatSpec, ConversationsSpec
from rlix.protocol.errors import SpecError
from tests.pipeline.chat_models import byte_tokenizer, template
from tests.pipeline.in_process import InProcess
from tests.pipeline.training_jobs import closing_jobs, replicas, rows

RIGHT = '{"prompt": "1>", "answer": "1"}'
TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def table(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "given.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source(folder: Path, rows: list[dict[str, Any]], size: int = 1, context: int = 200, **spec: Any) -> Any:
    tokenizer = byte_tokenizer(template("qwen2_5"))
    around = Surroundings(
        job="given",
        seed=0,
        groups=len(rows),
        group_size=size,
        sampling=Sampling(max_new_tokens=1),
        context=context,
        tokenizer=tokenizer,
        ends=Ends(tokenizer, folder),
        timeout_s=1.0,
        stop=threading.Event(),
        generator=NoRollouts,  # type: ignore[arg-type]
    )
    return ConversationSource(ConversationsSpec(path=str(table(folder, *rows)), **spec), around, ChatSpec())


def learnt(sample: Any) -> list[str]:
    tokenizer = byte_tokenizer(template("qwen2_5"))
    return [tokenizer.decode(list(turn.answer.token_ids)) for turn in sample.turns]


def test_of_a_conversation_each_answer_is_learnt_up_to_its_end(tmp_path: Path) -> None:
    made = source(tmp_path, [{"messages": TALK}])
    (sample,) = made.finish(made.begin(0)).samples
    assert learnt(sample) == ["2<|im_end|>", "yes<|im_end|>"]
    tokenizer = byte_tokenizer(template("qwen2_5"))
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(list(sample.token_ids)) == whole.removesuffix("\n")


@pytest.mark.parametrize("talk", [False, True])
def test_a_pair_is_a_group(talk: bool, tmp_path: Path) -> None:
    right, wrong = ([*TALK[:1], {"role": "assistant", "content": a}] if talk else a for a in ("2", "3"))
    row = {"chosen": right, "rejected": wrong} | ({} if talk else {"prompt": "1+1?"})
    made = source(tmp_path, [row], size=2)
    samples = made.finish(made.begin(0))
    assert [learnt(sample) for sample in samples.samples] == [["2<|im_end|>"], ["3<|im_end|>"]]
    assert samples.rewards.tolist() == [1.0, 0.0]
    first, second = (sample.turns[0].observation_ids for sample in samples.samples)
    assert first == second


def test_rows_are_seen_in_epochs_and_those_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": str(i) * (300 if i == 3 else 1)} for i in range(5)]
    made = source(tmp_path, rows, answer="answer")
    assert made.different == 4
    answers = [learnt(s)[0][0] for step in range(4) for s in made.finish(made.begin(step)).samples]
    assert [sorted(answers[i : i + 4]) for i in range(0, 20, 4)] == [["0", "1", "2", "4"]] * 5
    assert made.supervised(0, 2) == made.supervised(0, 2)


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([{"text": "?"}], {}, "has no column 'messages'; its columns are text"),
        ([{"messages": []}], {}, "column 'messages' is empty"),
        ([{"messages": TALK[:1]}], {}, "nobody has the role 'assistant'"),
        ([{"messages": ["hello"]}], {}, ":1: column 'messages' holds neither a text nor a list of messages"),
        ([{"messages": "hello", "prompt": "a"}], {}, "column 'messages' holds neither"),
        ([{"chosen": "a", "rejected": "b"}], {"size": 2}, "column 'prompt' is empty"),
        ([{"prompt": "a", "chosen": 5, "rejected": 6}], {"size": 2}, "column 'chosen' holds neither .* messages: 5"),
        ([{"prompt": "a", "chosen": "a"}], {"size": 2}, "has no column 'rejected'"),
        ([{"messages": TALK}], {"context": 5}, "every row has more than 5 tokens; use a model"),
    ],
)
def test_what_cannot_be_learnt_is_said(rows: Any, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said):
        source(tmp_path, rows, **more)


def test_where_a_row_is_in_its_file_is_looked_up_only_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look reads the file up to the row."""
    monkeypatch.setattr("rlix.pipeline.sources.tables.place", lambda *_: pytest.fail("the file was read again"))
    assert source(tmp_path, [{"messages": TALK}] * 3).different == 3


@pytest.mark.parametrize(
    ("lines", "given", "said"),
    [
        (None, {}, "source.conversations.path: there is no file or folder"),
        (
            ['{"prompt": "1>", "answer": "1"}'],
            {},
            "source.conversations.messages: given.jsonl has no column 'messages'",
        ),
        (['{"prompt": "1>", "answer": "1"}'] * 2 + ["{"], {"answer": "answer"}, "conversations.path: .*:3: is no JSON"),
        (
            ['{"prompt": "1>", "answer": "1"}', '{"prompt": "", "answer": "1"}'],
            {"answer": "answer"},
            "'prompt' is empty",
        ),
        (['{"prompt": "1>", "answer": "x"}'], {"answer": "answer"}, "does not know every character of 'x'"),
        (['{"prompt": "1>", "answer": "1"}'], {"answer": "answer"}, "no mistake in given"),
    ],
)
@pytest.mark.parametrize("section", ["source", "warmup"])
def test_check_looks_at_conversations(
    lines: list[str] | None, given: dict[str, Any], said: str, section: str, tmp_path: Path
) -> None:
    if lines is not None:
        (tmp_path / "given.jsonl").write_text("\n".join(lines))
    table: dict[str, Any] = {"conversations": {"path": "given.jsonl", **given}}
    of_source = {"source": table, "algorithm": "sft", "rollout": {"max_new_tokens": 4, "samples_per_prompt": 1}}
    of_warmup = {"source": {"task": "sort_digits"}, "warmup": {"steps": 1, **table}, "rollout": {"max_new_tokens": 6}}
    clusters = {"actor_train": {"gpus": 1}}
    job = {"name": "given", "steps": 1, "clusters": clusters, **(of_source if section == "source" else of_warmup)}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "job.yaml")])
    assert re.search(said.replace("source.", f"{section}.", 1), result.output), result.output


def job(folder: Path, **changes: Any) -> JobSpec:
    rows = [{"prompt": f"{i}>", "answer": f"{i}{i}", "chosen": f"{i}{i}", "rejected": f"{i}0"} for i in range(1, 9)]
    given = {"path": str(table(folder, *rows)), "answer": "answer"}
    values = {
        "name": "given",
        "steps": 20,
        "source": {"conversations": given},
        "algorithm": "sft",
        "model": {"hidden_size": 32, "layers": 1, "heads": 2},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 1, "max_new_tokens": 4},
        "optimizer": {"learning_rate": 1e-2},
        "clusters": {"actor_train": {"gpus": 1}},
    }
    return JobSpec.model_validate_json(json.dumps(values | changes))


PAIRS = {"prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 4}


def test_a_job_without_rollouts_learns_what_is_given(tmp_path: Path) -> None:
    spec = job(tmp_path)
    assert list(spec.clusters_in_use) == ["actor_train"]
    pipeline = InProcess(spec, tmp_path)
    found = pipeline.run_steps()
    assert set(pipeline.phases) == {"ACTOR_TRAINING"}
    assert found[-1]["loss"] < 0.5 * found[0]["loss"]
    assert not any("mismatch_kl" in row or "importance" in row for row in found)


@pytest.mark.ray
def test_such_a_job_has_no_replicas(ray_session: Any, tmp_path: Path) -> None:
    spec = job(tmp_path, name="adapter", algorithm="dpo", rollout=PAIRS, lora={"rank": 4}, steps=2)
    with closing_jobs() as jobs:
        (handle,) = jobs.start(spec, runs=tmp_path)
        jobs.finish(handle)
        assert not replicas(handle)
    assert [row["dpo_accuracy"] >= 0 for row in rows(tmp_path / "adapter" / "metrics.jsonl")] == [True, True]


def test_preferences_are_learnt_against_the_policy_at_the_start(tmp_path: Path) -> None:
    spec = job(tmp_path, algorithm="dpo", rollout=PAIRS)
    assert list(spec.clusters_in_use) == ["reference", "actor_train"]
    found = InProcess(spec, tmp_path).run_steps()
    assert found[0]["dpo_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1]["dpo_accuracy"] == 1.0
    assert found[-1]["dpo_loss"] < 0.5


def threads() -> set[int | None]:
    """Of sources that are open."""
    return {thread.ident for thread in threading.enumerate() if thread.name == "samples"}


def test_a_run_may_begin_with_conversations(tmp_path: Path) -> None:
    (tmp_path / "beginning").mkdir()
    path = table(tmp_path / "beginning", *[{"prompt": f"{i}>", "answer": "77"} for i in range(9)])
    given = {"path": str(path), "answer": "answer"}
    warmup = {"steps": 30, "batch_size": 8, "learning_rate": 1e-2, "conversations": given}
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 5}
    task = {"task": "sort_digits"}
    spec = job(tmp_path, source=task, algorithm="grpo", steps=1, rollout=rollout, warmup=warmup)
    pipeline = InProcess(spec, tmp_path)
    before = threads()
    pipeline.run_steps()
    assert threads() <= before
    tokenizer = pipeline.source.around.tokenizer
    ids = torch.tensor([tokenizer.encode("5>")])
    said = pipeline.actor.module(input_ids=ids).logits[0, -1].argmax()
    assert tokenizer.decode([int(said)]) == "7"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": "grpo"}, "grpo does not learn from samples of this source; use sft or dpo"),
        ({"algorithm": "dpo"}, "dpo learns from pairs; set it to 2"),
        ({"rollout": PAIRS}, "sft learns from one conversation in a row; set it to 1"),
        ({"algorithm": {"name": "dpo", "minibatches": 2}, "rollout": PAIRS}, "dpo takes one update per step"),
        ({"source": {"task": "sort_digits"}}, "sft does not learn from samples of this source; name a table"),
        ({"evaluation": {"every": 1}}, "evaluation.source: is missing: conversations have no rewards"),
        (
            {"rollout": {"spare_prompts": 1, "max_new_tokens": 4}},
            "rollout.spare_prompts: is for what the policy generates",
        ),
        ({"plan": "auto", "clusters": {}}, "plan: is for jobs with rollouts"),
    ],
)
def test_what_does_not_go_together_is_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        job(tmp_path, **changes)


def test_paths_are_relative_to_the_jobs_file(tmp_path: Path) -> None:
    spec = job(tmp_path)
    values = json.loads(spec.model_dump_json(exclude_unset=True))
    values["source"]["conversations"]["path"] = "given.jsonl"
    (tmp_path / "job.yaml").write_text(json.dumps(values))
    assert load_job(tmp_path / "job.yaml").source == spec.source
