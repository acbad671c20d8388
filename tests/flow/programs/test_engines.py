"""A policy's answers and training as parts of a flow: what they learn is what a job of the same numbers learns."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig

from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.planner import Plan, SegmentPlan
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.running import Running
from rlix.flow.programs.wiring import Part
from rlix.pipeline import parts
from rlix.pipeline.parts import Answered, Generate, Policy, Score, Train
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.spec.sections import Sections
from rlix.protocol.errors import SpecError
from rlix.protocol.types import Phase
from tests.flow.programs.pretended import POOL
from tests.pipeline.in_process import Engine, Generator, InProcess, built_here
from tests.pipeline.test_composition import job

pytestmark = pytest.mark.usefixtures("no_ray")
PLAIN: dict[str, Any] = {"name": "plain", "steps": 1, "rollout": {"max_new_tokens": 4}}
KL = {"name": "grpo", "minibatches": 2, "options": {"kl_coefficient": 0.1}}


class Training:
    """As a `TrainEngine` of one rank in this process; `where` it has been."""

    made: ClassVar[list["Training"]] = []

    def __init__(self, module: Any, executor: str) -> None:
        self.spec, self.where = module, list[str]()
        self.made.append(self)

    def build(self, **given: Any) -> None:
        self.path = given["weights_path"]
        given["name_holders"]({})

    def configure_optimizer(self, optimizer: Any, *_: object) -> None:
        self.engine = Engine(built_here(self.spec, self.path, optimizer, Sections(**PLAIN)), self.path)

    def cuda(self) -> None:
        self.where.append("device")

    def cpu(self) -> None:
        self.where.append("host")

    def save_state(self, folder: Path) -> None:
        folder.mkdir()
        state = {name: getattr(self.engine.module, name).state_dict() for name in ("optimizer", "scheduler")}
        torch.save({**state, "module": self.engine.module.state_dict()}, folder / "state")

    def load_state(self, folder: Path) -> None:
        state = torch.load(folder / "state")
        self.engine.module.load_state_dict(state.pop("module"))
        for name, value in state.items():
            getattr(self.engine.module, name).load_state_dict(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["engine"], name)


class Answering:
    """As an `InferenceEngine`, which answers as the tests' generator of jobs does; `loaded` with which weights."""

    loaded: ClassVar[list[Any]] = []

    def __init__(self, folder: str, executor: str) -> None:
        self.folder, self.processes = folder, dict[int, Any]()

    def build(self, **given: Any) -> None:
        config = AutoConfig.from_pretrained(self.folder)
        self.generator = Generator(int(config.vocab_size), int(config.eos_token_id))

    def acquire(self, lease: Any, weights: Any) -> None:
        self.loaded.append(weights)

    def update_weights(self, weights: Any) -> None:
        self.loaded.append(weights)

    def release(self, lease: Any) -> None: ...

    def close(self) -> None: ...

    def generate(self, prompts: Any, params: Any, request_ids: Any) -> list[Any]:
        found = []
        for prompt, given, id in zip(prompts, params, request_ids, strict=True):
            asked = Trajectory(id, tuple(prompt), given["seed"], Sampling(given["max_new_tokens"]))
            said = self.generator._answered(asked)
            one = {"token_ids": said.token_ids, "logprobs": said.logprobs, "finish_reason": said.finish_reason}
            found.append(SimpleNamespace(outputs=(SimpleNamespace(**one),)))
        return found


class Judge(FlowWorker):
    phase = Phase.OLD_LOG_PROBS

    def __init__(self, task: Any) -> None:
        self.task = task

    def run(self, answered: Sequence[Answered]) -> list[Answered]:
        return [
            one.rewarded(self.task.reward(one.prompt, s.turns[0].answer.token_ids) for s in one.samples)
            for one in answered
        ]


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "TrainEngine", Training)
    monkeypatch.setattr(parts, "InferenceEngine", Answering)
    monkeypatch.setattr(Training, "made", [])
    monkeypatch.setattr(Answering, "loaded", [])


@pytest.mark.parametrize("algorithm", ["grpo", KL, "dr_grpo"])
def test_a_flow_learns_what_the_job_of_the_same_numbers_learns(algorithm: Any, tmp_path: Path) -> None:
    chosen = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    spec = job("task", "on_policy", chosen, tmp_path, warmup=None)
    pipeline = InProcess(spec, tmp_path)
    rows = pipeline.run_steps()
    task: Any = pipeline.source._task  # type: ignore[attr-defined]
    policy = Policy(spec)
    score = [Score(policy)] if chosen is KL else []
    flow = Flow("grpo", [Generate(policy), Part("judge", Judge, kwargs={"task": task}), *score, Train(policy)], 2)
    with Running(flow, POOL[:2], plan=flow.unmeasured(2)) as running:
        for step, row in enumerate(rows):
            prompts = task.prompts(spec.seed, step, 2)
            assert [one.prompt for one in running.step(prompts)] == prompts
            same = {name: value for name, value in running.metrics.items() if name in row}
            assert same == {name: row[name] for name in same}
            assert {"loss", "trajectories_digest", "reward"} <= same.keys()
        trained = Training.made[-1]
        theirs = pipeline.actor.module.state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in trained.module.state_dict().items())
    assert any(row["grad_norm"] > 0 for row in rows)
    assert Answering.loaded == [None, 1, 2, 3]  # each step's answers come from what the one before it published
    assert trained.where == ["host", "device"] * 3  # whose place others need


def test_who_stays_on_its_devices_answers_by_what_was_published_last() -> None:
    policy = Policy(rollout={"max_new_tokens": 4, "samples_per_prompt": 2})
    flow = Flow("apart", [Generate(policy), Train(policy)], 2)
    first, second = (segment.stages[0] for segment in flow.unmeasured(1).segments)
    last = replace(second, first=1, parts=(replace(second.parts[0], first=1),))
    plan = Plan((SegmentPlan((first, last), 2, 0.0),), 2, 2, 0.0, 0.0, resident=True)
    with Running(flow, POOL[:2], plan=plan) as running:
        for _ in range(3):
            running.step(["1>", "2>"])
    assert Answering.loaded == [None, 1, 2]


def test_parts_ask_for_what_they_do() -> None:
    policy = Policy(rollout={"max_new_tokens": 4})
    found = {part.name: part.worker.phase for part in (Generate(policy), Score(policy), Train(policy))}
    assert found == {
        "generate": Phase.VALUE_COMPUTE,
        "score": Phase.REFERENCE_LOG_PROBS,
        "train": Phase.ACTOR_TRAINING,
    }
    assert [part.chunk for part in (Generate(policy), Score(policy), Train(policy))] == [1, None, None]


def test_a_prompt_may_be_text() -> None:
    policy = Policy(rollout={"max_new_tokens": 4, "samples_per_prompt": 2})
    flow = Flow("answers", [Generate(policy)], 2)
    with Running(flow, POOL[:1], plan=flow.unmeasured(1)) as running:
        first, second = running.step(["1>", "1>"])
        assert [sample.id for sample in first.samples + second.samples] == ["0/0/0", "0/0/1", "0/1/0", "0/1/1"]
        assert first.texts != second.texts
        again = running.step(["1>", "1>"])
        assert [one.prompt.id for one in again] == ["1/0", "1/1"]
        with pytest.raises(SpecError, match="an item is a prompt's text, or a task's Prompt, not int"):
            running.step(["2>", 1])
        assert [one.prompt.id for one in running.step(["2>", "2>"])] == ["2/0", "2/1"]  # the one that failed


def test_what_makes_no_sense_is_said_where_it_is_written() -> None:
    with pytest.raises(SpecError, match=r"Policy: rollout\.max_new_tokens: Field required"):
        Policy(rollout={})
    with pytest.raises(SpecError, match="Policy: no part of a flow is the critic or teacher that ppo needs"):
        Policy(rollout={"max_new_tokens": 4}, algorithm={"name": "ppo"})
    with pytest.raises(SpecError, match="generate: _Generate has an engine: leave out each and cpu_ranks"):
        Generate(Policy(rollout={"max_new_tokens": 4}), each=1)
    asking = Policy(rollout={"max_new_tokens": 4, "samples_per_prompt": 2}, algorithm=KL)
    flow = Flow("grpo", [Generate(asking), Train(asking)], 2)
    with (
        Running(flow, POOL[:1], plan=flow.unmeasured(1)) as running,
        pytest.raises(SpecError, match="Train: grpo compares with a reference here: put Score before it"),
    ):
        running.step(["1>", "2>"])


def test_training_that_is_started_again_goes_on_equal_to_the_bit() -> None:
    policy = Policy(
        rollout={"max_new_tokens": 4, "samples_per_prompt": 4}, optimizer={"learning_rate": 1e-3}, algorithm=KL
    )
    task = SimpleNamespace(reward=lambda prompt, ids: float(len(ids)))
    parts = [Generate(policy), Part("judge", Judge, kwargs={"task": task}), Score(policy), Train(policy)]
    flow = Flow("again", parts, 2)
    with Running(flow, POOL[:1], plan=flow.unmeasured(1)) as running:
        running.step(["1>", "2>"])
        running.keep()
        later = [one.prompt for one in running.step(["3>", "4>"])]
        once, published = running.metrics, policy.published
        for names in (["train"], []):  # all, in the second round
            running.restart(*names)
            running.step(later)
            assert Answering.loaded[-1].version == 1
            assert running.metrics == once
            assert (policy.version, policy.published) == (2, published)
        assert once["grad_norm"] > 0
        running.keep()
        assert len(list(policy.kept().parent.glob("state-*"))) == 1  # of the states that were kept, the last
