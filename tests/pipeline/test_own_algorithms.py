"""The algorithms of `examples/algorithms`: each is what it says, by hand, and takes real steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from rlix.pipeline.algorithms import Needs, Scores
from rlix.pipeline.algorithms.base import Setting
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.algorithms.groups import Grpo
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.samples import Answer, Samples, Turn
from rlix.pipeline.spec.algorithm import AlgorithmSpec, GrpoOptions
from rlix.pipeline.spec.model import TinyModel
from rlix.protocol.errors import SpecError
from tests.pipeline.in_process import InProcess
from tests.pipeline.plain_samples import samples_of
from tests.pipeline.test_composition import job

CLASSES = {"bonus": "EntropyBonus", "gdpo": "Gdpo", "turns": "TurnCredit", "teacher": "Taught"}


@pytest.fixture(scope="module")
def files() -> Path:
    """The folder with each as its own file."""
    return Path(__file__).parents[2] / "examples" / "algorithms"


def spec_of(name: str, files: Path, **options: Any) -> AlgorithmSpec:
    return AlgorithmSpec(name=f"{files / name}.py:{CLASSES[name]}", options=options)


def batch_of(samples: Samples) -> Any:
    return build_algorithm(AlgorithmSpec(), 9).begin(samples, 0)[0]


def test_the_bonus_is_the_mean_entropy(files: Path) -> None:
    mine, plain = build_algorithm(spec_of("bonus", files), 2), build_algorithm(AlgorithmSpec(), 2)
    samples = samples_of([0.0, 1.0], 2, tokens=[1, 2])
    batch = batch_of(samples)
    mine.prepare(samples, batch)
    entropies = torch.tensor([[1.0, 9.0], [2.0, 3.0]])  # the 9 is no token of the policy's
    scores = Scores(torch.full((2, 2), -1.0), entropies)
    loss, without = (algorithm.loss(scores, batch, 3.0)[0] for algorithm in (mine, plain))
    assert_close(without - loss, torch.tensor(0.01 * 6.0 / 3))


def test_each_reward_is_compared_by_itself(files: Path) -> None:
    """The one that is a hundred times larger has no more to say."""
    given = [(0.0, 100.0), (1.0, 0.0), (0.0, 0.0), (1.0, 100.0)]
    plain = samples_of([sum(both) for both in given], 2)
    parts = [tuple(zip(("small", "large"), both, strict=True)) for both in given]
    samples = replace(plain, samples=[replace(s, parts=p) for s, p in zip(plain.samples, parts, strict=True)])
    found = build_algorithm(spec_of("gdpo", files), 2).estimate(samples, batch_of(samples)).advantages
    # in the first group they are of two minds, in the second of one: ±sqrt(1/2) each, then over the batch's deviation
    each = math.sqrt(0.5)
    assert_close(found, torch.tensor([0.0, 0.0, -2 * each, 2 * each]) / (2 * each * math.sqrt(0.5)))


def test_a_turn_is_compared_with_the_same_turn_of_others(files: Path) -> None:
    def turn(tokens: int, reward: float) -> Turn:
        return Turn((3,), Answer((4,) * tokens, (-1.0,) * tokens, (0,) * tokens), reward)

    first, second = samples_of([5.0, 1.0], 2).samples
    played = [replace(first, turns=(turn(1, 1.0), turn(2, 0.0))), replace(second, turns=(turn(2, 0.0),))]
    samples = Samples(played, 2)
    assert samples.turn_rewards.tolist() == [[1.0, 4.0], [1.0, 0.0]]
    found = build_algorithm(spec_of("turns", files), 9).estimate(samples, batch_of(samples)).advantages
    # from the first turn on 5 and 1: ±sqrt(1/2); nobody else had a second one
    half = math.sqrt(0.5)
    assert_close(found, torch.tensor([[half, 0.0, 0.0, 0.0], [-half, -half, 0.0, 0.0]]))


def test_a_teacher_says_at_each_token_what_is_better(files: Path) -> None:
    spec = spec_of("teacher", files, teacher="somewhere", weight=0.5)
    assert spec.needs(off_policy=False) == Needs(old_log_probs=True, reference=True, teacher="somewhere")
    samples = samples_of([0.0, 1.0], 2, tokens=2)
    batch = batch_of(samples)
    batch["old_log_probs"] = torch.tensor([[-1.0, -1.0], [-2.0, -1.0]])
    batch["reference_log_probs"] = torch.tensor([[-1.0, -3.0], [-1.0, -1.0]])
    half = math.sqrt(0.5)
    found = build_algorithm(spec, 2).estimate(samples, batch).advantages
    assert_close(found, torch.tensor([[-half, -half - 1.0], [half + 0.5, half]]))


def run(name: str, files: Path, folder: Path, options: dict[str, Any]) -> tuple[list[dict[str, float]], InProcess]:
    source = {"turns": "environment", "gdpo": "data"}.get(name, "task")
    algorithm = spec_of(name, files, **options).model_dump()
    pipeline = InProcess(job(source, "on_policy", {**algorithm, "minibatches": 2}, folder, steps=2), folder)
    return pipeline.run_steps(), pipeline


@pytest.mark.parametrize("name", CLASSES)
def test_it_trains(name: str, files: Path, tmp_path: Path) -> None:
    teacher = write_tiny_model(TinyModel(hidden_size=32), tmp_path / "teacher", seed=7)
    rows, pipeline = run(name, files, tmp_path, {"teacher": str(teacher)} if name == "teacher" else {})
    assert any(row.get("grad_norm", 0.0) > 0 for row in rows)
    assert ("REFERENCE_LOG_PROBS" in pipeline.phases) == (name == "teacher")


def test_a_teacher_with_other_tokens_is_refused(files: Path, tmp_path: Path) -> None:
    teacher = write_tiny_model(TinyModel(alphabet="abc"), tmp_path / "teacher", seed=7)
    with pytest.raises(SpecError, match=r"options.teacher: the tokens of '.*' are not those of the model that learns"):
        run("teacher", files, tmp_path, {"teacher": str(teacher)})
    with pytest.raises(SpecError, match=r"options.teacher: 'no/where' is neither a local folder"):
        run("teacher", files, tmp_path, {"teacher": "no/where"})


class Listed(Grpo):
    def estimate(self, samples: Samples, batch: Any) -> Any:
        return [0.0] * len(samples)


def test_what_an_estimate_must_be_is_said_with_its_place() -> None:
    samples = samples_of([0.0, 1.0], 2)
    mine = Listed(GrpoOptions(), Setting(2))
    line = Listed.estimate.__code__.co_firstlineno
    with pytest.raises(
        TypeError, match=rf"Listed\.estimate returned list; .* 2 samples \(.*{Path(__file__).name}:{line}\)$"
    ):
        mine.prepare(samples, batch_of(samples))
