"""Tasks of `reasoning-gym` by name."""

import asyncio
import string
from pathlib import Path
from typing import Any

import pytest

from rlix.pipeline.sources.environments import Action, Instance, Transition
from rlix.pipeline.sources.environments.reasoning import ReasoningEnvironment
from rlix.pipeline.sources.place import EVALUATION, TRAIN, Place
from rlix.pipeline.spec.job import JobSpec
from tests.integrations.test_openai import TEMPLATE
from tests.pipeline.in_process import InProcess

SUMS = {"dataset": "chain_sum", "rows": 64, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def played(answer: str, place: Place | None = None, **options: Any) -> tuple[str, Transition]:
    """The question, as it is asked, and what `answer` gets; `{}` in it stands for the right one."""

    async def main() -> tuple[str, Transition]:
        environment = ReasoningEnvironment(Instance("t", 0, place=place or Place()), **{**SUMS, **options})
        *_, question = await environment.reset(0)
        asked = str(question["content"])
        right = str(eval(asked.partition(":")[2].partition("=")[0]))
        return asked, await environment.step(Action(answer.format(right), ()))

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "options", "reward"),
    [
        ("they are <answer>{}</answer>", {}, 1.0),
        ("{}", {}, 0.0),
        ("<answer>no number</answer>", {}, 0.0),
        (" {}\n", {"system": None}, 1.0),
    ],
)
def test_the_package_judges_what_stands_between_tags(answer: str, options: dict[str, Any], reward: float) -> None:
    _, transition = played(answer, **options)
    assert (transition.reward, transition.exact, transition.done) == (reward, reward == 1.0, True)


def test_questions_come_in_epochs_and_none_of_an_evaluation_is_trained_on() -> None:
    asked = {
        split: [played("", Place(split, number, seed=3))[0] for number in range(64)] for split in (TRAIN, EVALUATION)
    }
    assert len(set(asked[TRAIN])) > 32, "few come twice: they have one digit"
    assert asked[TRAIN] == [played("", Place(TRAIN, number, seed=3))[0] for number in range(64)]
    assert set(asked[EVALUATION]).isdisjoint(asked[TRAIN])


def test_too_few_questions_for_a_split_are_said() -> None:
    with pytest.raises(ValueError, match=r"none of the 1 rows of 'chain_sum' is for the split .*: give it more 'rows'"):
        for split in (TRAIN, EVALUATION):
            played("", Place(split), rows=1)


def test_a_job_learns_from_them(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    pipeline = InProcess(
        JobSpec.model_validate(
            {
                "name": "sums",
                "steps": 1,
                "model": {"alphabet": string.printable, "context": 1024},
                "source": {
                    "environment": {
                        "name": "reasoning_gym",
                        "options": SUMS,
                        "reset_timeout_s": 600.0,
                        "step_timeout_s": 600.0,
                    },
                    "chat": {"template": str(tmp_path / "template.jinja")},
                },
                "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
                "evaluation": {"every": 1, "prompts": 2, "samples_per_prompt": 1},
                "clusters": {"actor_train": {"gpus": 1}},
            }
        ),
        tmp_path / "run",
    )
    (metrics,) = pipeline.run_steps()
    assert (metrics["env_failed"], metrics["turns"], metrics["trajectories"]) == (0.0, 1.0, 4.0)
    assert metrics["eval/trajectories"] == 2.0
