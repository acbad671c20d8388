"""A `verifiers` environment by name: its own conversation and rubric, the job's policy."""

from pathlib import Path

import pytest

from rlix.integrations.openai.verifiers_agent import VerifiersAgent
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.errors import SpecError
from tests.integrations.test_openai import TEMPLATE
from tests.pipeline.in_process import InProcess

ENVIRONMENT = """
import datasets
import verifiers as vf

class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]

def load_environment(rows=4, held_out=0):
    data = datasets.Dataset.from_list([{"question": f"say {i}", "answer": str(i)} for i in range(rows)])

    def long(completion, **kwargs):
        return float(sum(len(message["content"]) for message in completion if message["role"] == "assistant"))

    other = [{"question": f"say held {i}", "answer": str(i)} for i in range(held_out)]
    held = datasets.Dataset.from_list(other) if other else None
    return Twice(dataset=data, eval_dataset=held, rubric=vf.Rubric(funcs=[long]), max_turns=2)
"""


def spec(folder: Path, environment: str) -> JobSpec:
    (folder / "template.jinja").write_text(TEMPLATE)
    options = {"environment": environment, "rows": 3}
    return JobSpec.model_validate(
        {
            "name": "verified",
            "steps": 1,
            "model": {"alphabet": "0123456789abcdefghijklmnopqrstuvwxyz<> "},
            "source": {
                "openai": {"name": "verifiers", "options": options},
                "chat": {"template": str(folder / "template.jinja")},
            },
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 6},
            "clusters": {"actor_train": {"gpus": 1}},
        }
    )


def test_a_job_learns_from_an_environment(rlix_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "say_twice.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    (metrics,) = InProcess(spec(tmp_path, "say-twice"), tmp_path / "run").run_steps()
    assert (metrics["trajectories"], metrics["turns"], metrics["agent_failed"]) == (4.0, 2.0, 0.0)
    assert metrics["reward"] > 2


def test_a_release_with_another_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("verifiers.load_environment")
    with pytest.raises(SpecError, match=r"verifiers 0\.1\.\d+ has no 'load_environment'; install 'verifiers<0\.2'"):
        VerifiersAgent("say-twice")


@pytest.mark.parametrize("held_out", [0, 2])
def test_an_evaluation_plays_rows_that_are_held_out(
    held_out: int, rlix_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "say_held_out.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    values = spec(tmp_path, "say-held-out").model_dump()
    values["source"]["openai"]["options"]["held_out"] = held_out
    values |= {"steps": 3, "evaluation": {"every": 3, "prompts": 5}}
    pipeline = InProcess(JobSpec.model_validate(values), tmp_path / "run")
    if not held_out:
        with pytest.raises(SpecError, match="the environment holds no rows out"):
            pipeline.run_steps()
        return
    metrics = pipeline.run_steps()[-1]
    assert metrics["eval/trajectories"] == held_out  # each once, not five
    first = [t for t, _ in pipeline.rollouts.answered if t.id.endswith("/0/0")]  # the first turn of each group's first
    asked = {t.prompt_ids for t in first if not t.purpose}
    assert len(first) - held_out == 6
    assert len(asked) == 3  # two epochs of three rows in three steps of two
    assert not asked & {t.prompt_ids for t in first if t.purpose}


def test_an_environment_that_is_not_there_is_named(rlix_home: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"source.openai.options.environment: 'no-such' cannot be loaded"):
        InProcess(spec(tmp_path, "no-such"), tmp_path / "run").setup()
