"""Multi-turn jobs: what is learnt from, what failures cost, and that sharing does not show."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rlix.pipeline.algorithms import group_relative_advantages, groups_with_spread, rloo_advantages
from rlix.pipeline.batch import collate
from rlix.pipeline.samples import Answer, End, Turn, measured
from rlix.pipeline.sources.base import Patience, SourceFailedError, judged
from rlix.pipeline.sources.environments.episode import Episode
from rlix.pipeline.sources.environments.guard import Tally
from rlix.pipeline.sources.episodes import environment_metrics
from rlix.pipeline.spec.job import load_job
from rlix.protocol.errors import SpecError
from tests.pipeline.in_process import InProcess
from tests.pipeline.training_jobs import agent, learnt_of

rewards = st.integers(0, 8).map(lambda eighths: eighths / 8)


# ---- what is learnt from ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(rewards, st.booleans()), min_size=4, max_size=4), rewards)
@hypothesis_settings(max_examples=50, deadline=None)
def test_what_does_not_count_changes_nothing(members: list[tuple[float, bool]], other: float) -> None:
    values, counts = torch.tensor([v for v, _ in members]), torch.tensor([c for _, c in members])
    changed = torch.where(counts, values, torch.full_like(values, other))
    for advantages in (group_relative_advantages, rloo_advantages):
        ours = advantages(values, 4, counts=counts)
        torch.testing.assert_close(ours, advantages(changed, 4, counts=counts))
        assert ours[~counts].eq(0).all()
        assert ours.sum().abs() < 1e-5
    assert groups_with_spread(values, 4, counts=counts) == groups_with_spread(changed, 4, counts=counts)


@given(st.lists(st.tuples(rewards, st.booleans()), min_size=4, max_size=4).filter(lambda m: sum(c for _, c in m) > 1))
@hypothesis_settings(max_examples=50, deadline=None)
def test_those_that_count_are_a_group_of_their_own(members: list[tuple[float, bool]]) -> None:
    values, counts = torch.tensor([v for v, _ in members]), torch.tensor([c for _, c in members])
    size = int(counts.sum())
    for advantages in (group_relative_advantages, rloo_advantages):
        torch.testing.assert_close(advantages(values, 4, counts=counts)[counts], advantages(values[counts], size))


def test_advantages_by_hand() -> None:
    counts = torch.tensor([True, False, True, True, True, False, False, False])
    values = torch.tensor([1.0, 9.0, 0.0, 0.5, 1.0, 9.0, 9.0, 9.0])
    assert group_relative_advantages(values, 4, counts=counts).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    plain = group_relative_advantages(values, 4, counts=counts, normalize_by_std=False)
    assert plain.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert rloo_advantages(values, 4, counts=counts).tolist() == [0.75, 0.0, -0.75, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert groups_with_spread(values, 4, counts=counts).tolist() == [True, False]


def test_observations_are_masked_out_of_the_loss() -> None:
    played = episode((Turn((10, 11), answer(12, 13)), Turn((14,), answer(15))))
    batch = collate(
        [(played.token_ids, played.from_policy), ((20, 21), ()), ((30, 31, 32), (False, False, True))], pad_id=0
    )
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 14, 15], [20, 21, 0, 0, 0, 0], [30, 31, 32, 0, 0, 0]]
    # position t predicts token t + 1
    assert batch["mask"].tolist() == [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]


def test_a_batch_of_nothing_is_still_a_batch() -> None:
    assert collate([((), ()), ((), ())], pad_id=0)["mask"].tolist() == [[0], [0]]


def test_metrics_count_failures_and_leave_them_out_of_means() -> None:
    good = episode((Turn((1,), answer(2)),), tally=Tally(seconds=1.0, failures=1, retries=1))
    bad = episode((), end=End.FAILED, tally=Tally(seconds=3.0, failures=2, timeouts=1, retries=1))
    metrics = environment_metrics([good, bad])
    assert metrics == {
        "turns": 0.5,
        "env_failed": 1.0,
        "env_faults": 3.0,
        "env_timeouts": 1.0,
        "env_retries": 2.0,
        "env_wait_s": 2.0,
    }
    left_out, paid = judged(bad, None), judged(bad, -2.0)
    assert (left_out.counts, paid.counts, paid.reward) == (False, True, -2.0)
    assert measured([good, left_out], metrics)["reward"] == 1.0
    assert measured([good, paid], {})["reward"] == -0.5
    assert measured([left_out], {})["reward"] == 0.0


def test_a_job_whose_environments_all_fail_gives_up_and_says_why() -> None:
    failed = replace(episode((), end=End.FAILED), error="no such sandbox")
    at_once = Patience("job", "environment")
    at_once.look_at([failed, episode(())])
    with pytest.raises(SourceFailedError, match="every environment of a step failed, the first, e: no such sandbox"):
        at_once.look_at([failed, failed])
    patience = Patience("job", "environment", paid=True)
    for step in (0, 1, 3, 4):
        patience.look_at([failed, failed])
        if step == 1:
            patience.look_at([failed, episode(())])
    for count in (3, 4):  # also when it is looked at again: an evaluation that found it hopeless does not end the job
        with pytest.raises(SourceFailedError, match=f"of {count} steps in a row failed, the first, e: no such sandbox"):
            patience.look_at([failed, failed])


def answer(*ids: int) -> Answer:
    return Answer(ids, (-0.5,) * len(ids), (0,) * len(ids))


def episode(turns: tuple[Turn, ...], end: End = End.DONE, tally: Tally | None = None) -> Episode:
    error = "it hung" if end is End.FAILED else None
    return Episode("e", turns, 1.0, end is End.DONE, end, error=error, tally=tally or Tally())


# ---- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("source"), r"source: is missing.*sort_digits"),
        (lambda d: d["source"].update(task="sort_digits"), "source: has task and environment; keep one"),
        (
            lambda d: d["source"].update(rewards="exact_match"),
            "source.rewards: a source with environment brings",
        ),
        (lambda d: d["source"]["environment"].pop("name"), r"source.environment.name: is missing"),
        (lambda d: d["source"]["environment"].update(name="digit_lokup"), "did you mean 'digit_lookup'"),
        (lambda d: d["source"]["environment"].update(nme="x"), "did you mean 'name'"),
        (
            lambda d: d["source"]["environment"]["options"].update(hop=3),
            r"options.hop: unknown key; did you mean",
        ),
        (lambda d: d["source"]["environment"]["options"].update(hops="x"), r"options.hops: must be a valid integer"),
        (
            lambda d: d["source"]["environment"]["options"].update(failure_rate=2),
            r"options.failure_rate: must be less than or equal to 1",
        ),
        (lambda d: d["source"].update(options={"hops": 3}), "source.options: .* under 'source.environment'"),
    ],
)
def test_mistakes_in_an_agentic_spec(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    data = load_job("agentic_lookup").model_dump(mode="json")
    data = {key: value for key, value in data.items() if value is not None}
    data["source"] = {"environment": data["source"]["environment"]}
    change(data)
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError, match=message):
        load_job(path)


# ---- whole jobs ------------------------------------------------------------------------------------------------------


def test_failing_environments_in_processes_give_the_same_job(tmp_path: Path) -> None:
    """Those that hang are in `test_environments_process.py`."""
    learnt = {}
    for runner in ("in_process", "subprocess"):
        schedule = {"name": "on_policy", "options": {}}
        spec = agent(environment={"runner": runner}, schedule=schedule, warmup=None, steps=2)
        metrics = InProcess(spec, tmp_path / runner).run_steps()
        assert sum(m["env_faults"] for m in metrics) >= 3, "environments must have failed"
        learnt[runner] = [learnt_of(m) for m in metrics]
    assert learnt["in_process"] == learnt["subprocess"]


def test_a_job_with_an_environment_of_gymnasium(tmp_path: Path) -> None:
    """One digit a turn; what is no action ends the episode."""
    options = {"id": "FrozenLake-v1", "is_slippery": False}
    spec = agent(
        environment={"name": "gym", "options": options, "runner": "subprocess", "max_turns": 6},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 1},
        warmup=None,
        steps=2,
    )
    metrics = InProcess(spec, tmp_path).run_steps()
    assert [m["env_failed"] for m in metrics] == [0, 0]
    assert all(1 < m["turns"] <= 6 for m in metrics)
