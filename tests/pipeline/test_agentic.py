"""Multi-turn jobs: what is learnt from, what failures cost, and that sharing does not show."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rlix.pipeline.agentic import AgenticPipeline, collate_turns, environment_metrics, group_advantages, mean_of
from rlix.pipeline.algorithms import group_relative_advantages
from rlix.pipeline.sources.environments.base import EnvironmentFailedError
from rlix.pipeline.sources.environments.episode import Answer, End, Episode, Turn
from rlix.pipeline.sources.environments.guard import Tally
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.protocol.errors import SpecError
from tests.pipeline.training_jobs import Jobs, agent, closing_jobs, learnt, on_two_devices, rows

rewards = st.integers(0, 8).map(lambda eighths: eighths / 8)


# ---- what is learnt from ---------------------------------------------------------------------------------------------


@given(st.lists(rewards, min_size=4, max_size=4 * 4).filter(lambda values: len(values) % 4 == 0), st.booleans())
@hypothesis_settings(max_examples=50, deadline=None)
def test_where_all_count_the_advantages_are_those_of_grpo(values: list[float], normalize: bool) -> None:
    everyone = torch.ones(len(values), dtype=torch.bool)
    ours = group_advantages(torch.tensor(values), everyone, 4, normalize_by_std=normalize)
    theirs = group_relative_advantages(torch.tensor(values), 4, normalize_by_std=normalize)
    torch.testing.assert_close(ours, theirs)


@given(st.lists(st.tuples(rewards, st.booleans()), min_size=4, max_size=4), rewards)
@hypothesis_settings(max_examples=50, deadline=None)
def test_what_does_not_count_changes_nothing(members: list[tuple[float, bool]], other: float) -> None:
    values, counts = torch.tensor([v for v, _ in members]), torch.tensor([c for _, c in members])
    changed = torch.where(counts, values, torch.full_like(values, other))
    ours = group_advantages(values, counts, 4)
    torch.testing.assert_close(ours, group_advantages(changed, counts, 4))
    assert ours[~counts].eq(0).all()
    assert ours.sum().abs() < 1e-5


def test_advantages_by_hand() -> None:
    counts = torch.tensor([True, False, True, True, True, False, False, False])
    values = torch.tensor([1.0, 9.0, 0.0, 0.5, 1.0, 9.0, 9.0, 9.0])
    assert group_advantages(values, counts, 4).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    plain = group_advantages(values, counts, 4, normalize_by_std=False)
    assert plain.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_observations_are_masked_out_of_the_loss() -> None:
    played = episode((Turn((10, 11), answer(12, 13)), Turn((14,), answer(15))))
    batch = collate_turns(
        [(played.token_ids, played.from_policy), ((20, 21), ()), ((30, 31, 32), (False, False, True))], pad_id=0
    )
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 14, 15], [20, 21, 0, 0, 0, 0], [30, 31, 32, 0, 0, 0]]
    # position t predicts token t + 1
    assert batch["mask"].tolist() == [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]


def test_a_batch_of_nothing_is_still_a_batch() -> None:
    assert collate_turns([((), ()), ((), ())], pad_id=0)["mask"].tolist() == [[0], [0]]


def test_metrics_count_failures_and_leave_them_out_of_means() -> None:
    good = episode((Turn((1,), answer(2)),), tally=Tally(seconds=1.0, failures=1, retries=1))
    bad = episode((), end=End.FAILED, tally=Tally(seconds=3.0, failures=2, timeouts=1, retries=1))
    metrics = environment_metrics([good, bad])
    assert metrics == {
        "env_failed": 1.0,
        "env_faults": 3.0,
        "env_timeouts": 1.0,
        "env_retries": 2.0,
        "env_wait_s": 2.0,
        "turns": 0.5,
    }
    assert mean_of([1.0, 7.0], [True, False]) == 1.0
    assert mean_of([1.0], [False]) == 0.0


def test_a_job_whose_environments_all_fail_gives_up_and_says_why() -> None:
    pipeline = AgenticPipeline.__new__(AgenticPipeline)  # nothing of a whole pipeline is needed
    pipeline.spec, pipeline._failed_steps = load_job("agentic_lookup"), 0
    failed = replace(episode((), end=End.FAILED), error="no such sandbox")
    for step in (0, 1, 3, 4):
        pipeline._check_environments(step, [failed, failed])
        if step == 1:
            pipeline._check_environments(2, [failed, episode(())])
    with pytest.raises(EnvironmentFailedError, match="of 3 steps in a row failed, the last one: no such sandbox"):
        pipeline._check_environments(5, [failed, failed])


def answer(*ids: int) -> Answer:
    return Answer(ids, (-0.5,) * len(ids), (0,) * len(ids))


def episode(turns: tuple[Turn, ...], end: End = End.DONE, tally: Tally | None = None) -> Episode:
    return Episode("e", turns, 1.0, end is End.DONE, end, tally or Tally())


# ---- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("environment"), r"environment: is missing.*digit_lookup"),
        (lambda d: d.update(pipeline="full_finetune"), "set 'pipeline: agentic'"),
        (lambda d: d.update(task={"name": "sort_digits"}), "task: an environment brings its own"),
        (lambda d: d["environment"].pop("name"), r"environment: give either 'name: digit_lookup' or 'factory"),
        (lambda d: d["environment"].update(nme="x"), "did you mean 'name'"),
        (lambda d: d["environment"]["options"].update(hop=3), r"environment.options: do not fit .*'hop'"),
        (lambda d: d["algorithm"].update(name="rloo"), r"algorithm.name: is rloo; .*must be grpo"),
    ],
)
def test_mistakes_in_an_agentic_spec(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    data = load_job("agentic_lookup").model_dump(mode="json")
    data = {key: value for key, value in data.items() if value is not None}
    change(data)
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError, match=message):
        load_job(path)


# ---- whole jobs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(ray_session: Any) -> Iterator[Jobs]:
    with closing_jobs() as made:
        yield made


def lake() -> JobSpec:
    """An environment of Gymnasium, one digit a turn; what is no action ends the episode."""
    return agent(
        name="lake",
        environment={
            "name": None,
            "factory": "rlix.pipeline.sources.environments.gym:GymnasiumEnvironment",
            "options": {"id": "FrozenLake-v1", "is_slippery": False},
            "runner": "subprocess",
            "max_turns": 6,
        },
        rollout={"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 1},
        pipeline="agentic",
        asynchronous=None,
        warmup=None,
        steps=2,
        clusters=on_two_devices(4),
    )


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_hanging_environments_in_processes_give_the_same_job_and_so_does_gymnasium(jobs: Jobs, tmp_path: Path) -> None:
    inside, outside = (
        agent(
            name=runner,
            environment={"runner": runner},
            pipeline="agentic",
            asynchronous=None,
            steps=2,
            clusters=on_two_devices(first),
        )
        for first, runner in ((0, "in_process"), (2, "subprocess"))
    )
    jobs.finish(*jobs.start(inside, outside, lake(), runs=tmp_path))
    assert learnt(tmp_path / "in_process") == learnt(tmp_path / "subprocess")
    hung = rows(tmp_path / "subprocess" / "metrics.jsonl")
    assert sum(m["env_timeouts"] for m in hung) >= 3, "environments must have hung"
    assert all(m["trajectories"] == inside.trajectories_per_step for m in hung)
    on_ice = rows(tmp_path / "lake" / "metrics.jsonl")
    assert [m["env_failed"] for m in on_ice] == [0, 0]
    assert all(1 < m["turns"] <= 6 for m in on_ice)
