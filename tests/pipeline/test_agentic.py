"""Multi-turn jobs: what is learnt from, what failures cost, and that sharing does not show."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rlix.pipeline.agentic import collate_turns, environment_metrics, group_advantages, mean_of
from rlix.pipeline.algorithms import group_relative_advantages
from rlix.pipeline.environments.episode import Answer, End, Episode, Turn
from rlix.pipeline.environments.guard import Tally
from rlix.pipeline.launch import JobHandle, launch, wait_all
from rlix.pipeline.spec import JobSpec, load_job
from rlix.protocol.errors import SpecError
from rlix.protocol.types import pipeline_namespace
from tests.pipeline.training_jobs import leases_left

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

STEPS = 3


def agentic_job(name: str, **environment: Any) -> JobSpec:
    """The shipped job, cut down; a third of its environments hang, so that some trajectories fail."""
    spec = load_job("agentic_lookup")
    options = {"hops": 2, "latency_scale": 0.02, "failure_rate": 0.35, "hang_share": 1.0}
    quick = {"options": options, "reset_timeout_s": 1.5, "step_timeout_s": 1.5, "max_turns": 3, **environment}
    assert spec.warmup is not None
    assert spec.environment is not None
    return spec.model_copy(
        update={
            "name": name,
            "steps": STEPS,
            "warmup": spec.warmup.model_copy(update={"steps": 40}),
            "rollout": spec.rollout.model_copy(update={"prompts_per_step": 4, "samples_per_prompt": 4}),
            "environment": spec.environment.model_copy(update=quick),
        }
    )


def other_job() -> JobSpec:
    spec = load_job("copy_digits")
    rollout = spec.rollout.model_copy(update={"prompts_per_step": 8, "samples_per_prompt": 4})
    return spec.model_copy(update={"steps": 12, "warmup": None, "rollout": rollout})


@pytest.fixture
def run(ray_session: Any) -> Iterator[Any]:
    """Launch jobs; whatever happens, they are closed afterwards."""
    handles: list[JobHandle] = []

    def start(specs: list[JobSpec], runs_dir: Path) -> list[JobHandle]:
        handles.extend(launch(specs, runs_dir))
        return handles[-len(specs) :]

    yield start
    for handle in handles:
        handle.close()


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def kill_a_replica(handle: JobHandle) -> None:
    namespace = pipeline_namespace(handle.pipeline_id)
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == namespace]
    ray.kill(ray.get_actor(sorted(name for name in names if "infer" in name)[-1], namespace=namespace))


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_hanging_environments_sharing_and_a_killed_replica_change_nothing_else(run: Any, tmp_path: Path) -> None:
    spec = agentic_job("agent")
    shared, other = run([spec, other_job()], tmp_path / "shared")
    while shared.status().step < 1:
        assert shared.status().state in ("starting", "running"), shared.status()
    kill_a_replica(shared)
    assert [s.state for s in wait_all([shared, other], timeout_s=140)] == ["finished"] * 2
    (alone,) = wait_all(run([spec], tmp_path / "alone"), timeout_s=140)
    assert alone.state == "finished"

    metrics = rows(tmp_path / "shared" / "agent")
    assert [row["step"] for row in metrics] == list(range(STEPS))
    assert sum(row["env_timeouts"] for row in metrics) >= 5, "environments must have hung"
    assert 1 <= sum(row["env_failed"] for row in metrics) <= 16, "some of the trajectories must have been given up"
    same = ("reward", "exact", "tokens", "turns", "env_failed", "env_faults", "env_timeouts", "env_retries", "loss")
    assert [[row[k] for k in same] for row in metrics] == [
        [row[k] for k in same] for row in rows(tmp_path / "alone" / "agent")
    ]
    leases = [e for e in rows(tmp_path / "shared" / "agent", "events.jsonl") if e["type"] == "lease"]
    assert any(e["event"] == "shrinking" for e in leases), "devices must have been taken away meanwhile"
    assert leases_left() == ()


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_environments_in_processes_give_the_same_job(run: Any, tmp_path: Path) -> None:
    options = {"hops": 2, "latency_scale": 0.0, "failure_rate": 0.0}
    jobs = [agentic_job(name, options=options, runner=name) for name in ("in_process", "subprocess")]
    jobs = [job.model_copy(update={"steps": 2}) for job in jobs]
    statuses = wait_all(run(jobs, tmp_path), timeout_s=140)
    assert [s.state for s in statuses] == ["finished"] * 2, statuses
    same = ("reward", "exact", "tokens", "turns", "env_failed")
    inside, outside = ([[row[k] for k in same] for row in rows(tmp_path / job.name)] for job in jobs)
    assert inside == outside
