"""Sharing, preemption, dying replicas and restarts change nothing that a job learns, and cost no trajectory."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
from transformers import AutoModelForCausalLM

from rlix.node.run_folder import list_checkpoints
from rlix.pipeline.jobs.export import export
from rlix.pipeline.spec.job import JobSpec
from tests.pipeline.gated_pipeline import gate, gated
from tests.pipeline.training_jobs import (
    Jobs,
    agent,
    ahead,
    closing_jobs,
    learnt,
    moved,
    ppo,
    replicas,
    rows,
    small,
    still_runs,
    until_nothing_is_held,
)

SPECS = (small(steps=6), ppo(steps=6, checkpoint={"every": 2}), agent())
EVALUATED = small(
    steps=6,
    evaluation={"every": 2, "prompts": 8, "source": {"task": {"name": "copy_digits", "options": {"digits": 3}}}},
    checkpoint={"every": 5, "keep": 1},
)
"""The first of them, evaluated while it learns, of which it must not notice anything."""


@pytest.fixture
def jobs(ray_session: Any) -> Iterator[Jobs]:
    with closing_jobs() as made:
        yield made


@pytest.fixture(scope="module")
def alone(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the three jobs learn when each has its devices to itself."""
    folder = tmp_path_factory.mktemp("alone")
    with closing_jobs() as made:
        grpo, critic = made.start(SPECS[0], moved(SPECS[1], by=4), runs=folder)
        made.finish(grpo)
        (episodes,) = made.start(SPECS[2], runs=folder)
        made.finish(critic, episodes)
    return {spec.name: learnt(folder / spec.name) for spec in SPECS}


@pytest.mark.ray
@pytest.mark.slow
def test_three_kinds_of_training_share_four_devices_while_replicas_die_and_jobs_come_and_go(
    jobs: Jobs, alone: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    shared = [gated(spec) for spec in (EVALUATED, *SPECS[1:])]
    running = dict(zip((spec.name for spec in SPECS), jobs.start(*shared, runs=tmp_path), strict=True))
    checkpoints = tmp_path / "ppo" / "checkpoints"
    victims: dict[str, Any] = {}
    untouched = set(running)
    while untouched:
        for name in sorted(untouched):
            still_runs(running[name])
            if name == "ppo":
                if len(untouched) == 1 and list_checkpoints(checkpoints):  # as if its machine had died
                    jobs.close(running[name])
                    untouched.remove(name)
            elif name not in victims:
                if found := replicas(running[name]):
                    victims[name] = found[0]
            elif (tmp_path / name / "metrics.jsonl").exists():
                ray.kill(victims[name])
                untouched.remove(name)
    for name in running:
        gate(tmp_path / name).touch()
    (running["ppo"],) = jobs.start(gated(SPECS[1]), runs=tmp_path, resume=True)
    (guest,) = jobs.start(small("copy_digits", steps=1), runs=tmp_path)
    jobs.finish(*running.values(), guest)
    until_nothing_is_held()

    for spec in SPECS:
        metrics = learnt(tmp_path / spec.name)
        assert [m["step"] for m in metrics] == list(range(spec.steps))
        assert {m["trajectories"] for m in metrics} == {spec.trajectories_per_step}
        assert metrics == alone[spec.name], f"{spec.name} has learnt something else than alone"
        shrunk = [e for e in rows(tmp_path / spec.name / "events.jsonl") if e.get("event") == "shrinking"]
        assert shrunk, f"nothing was taken from {spec.name}, so this shows nothing"

    phases = {e["phase"] for e in rows(tmp_path / "ppo" / "events.jsonl") if e["type"] == "lease"}
    assert len(phases) == 7, phases
    assert all(m["value_loss"] > 0 and m["value_grad_norm"] > 0 for m in alone["ppo"])
    episodes = rows(tmp_path / "agent" / "metrics.jsonl")
    assert [m["staleness_max"] for m in episodes] == [0, 1, 1, 1]
    assert sum(m["env_faults"] for m in episodes) >= 5, "environments must have failed"
    assert 1 <= sum(m["env_failed"] for m in episodes) <= 16, "some episodes must have been given up"
    evaluated_as_well(tmp_path / EVALUATED.name, tmp_path / "exported")


@pytest.mark.ray
def test_a_job_whose_gang_moves_at_every_phase_learns_the_same_to_the_bit(jobs: Jobs, tmp_path: Path) -> None:
    """Two ranks, to and fro between two places; beside it the same job, which stays."""
    sizes = {"actor_train": {"gpus": 2}, "actor_infer": {"gpus": 2}}
    moves = small(
        name="moves",
        pipeline={"name": "tests.pipeline.moving_pipeline:MovingPipeline"},
        clusters={**sizes, "actor_train": {"gpus": 2, "moves": True}},
    )
    jobs.finish(*jobs.start(moves, small(name="stays", clusters=sizes), runs=tmp_path))
    assert learnt(tmp_path / "moves") == learnt(tmp_path / "stays")
    events = rows(tmp_path / "moves" / "events.jsonl")
    granted = [tuple(e["devices"]) for e in events if e.get("event") == "granted" and e["cluster"] == "actor_train"]
    assert len(granted) > small().steps and len(set(granted)) == 2
    assert all(one != other for one, other in pairwise(granted))
    until_nothing_is_held()


def evaluated_as_well(folder: Path, exported: Path) -> None:
    """What is beside the training of EVALUATED."""
    metrics = rows(folder / "metrics.jsonl")
    assert [step for step, row in enumerate(metrics) if "eval/reward" in row] == [1, 3, 5]
    assert all(0 < row["slot_use"] <= 1 and row["reward_std"] >= 0 for row in metrics)
    best = int((folder / "checkpoints" / "best").resolve().name.removeprefix("step_"))
    assert best in (2, 4, 6)
    assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == sorted({best, 6})
    assert len(rows(folder / "samples.jsonl")) == 4 + 3 * 4  # of the first step, and of each evaluation
    assert list((folder / "tensorboard").iterdir())
    export(folder, exported, step="best")
    assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size == 16


def combined() -> tuple[JobSpec, JobSpec]:
    """PPO in environments, on policy, and on prompts, while the next step's are generated; one version per step."""
    algorithm = {"name": "ppo", "options": {"critic": {"learning_rate": 1e-3}}, "minibatches": 2}
    clusters = {"actor_train": {"devices": (0,)}, "actor_infer": {"devices": (0, 1)}, "critic": {"devices": (1,)}}
    in_environments = agent(name="agent_ppo", algorithm=algorithm, clusters=clusters, schedule={"name": "on_policy"})
    rule = {"max_staleness": 1, "in_flight": "finish"}
    return in_environments, ahead(rule, name="ahead_ppo", algorithm=algorithm, clusters=clusters)


@pytest.mark.ray
@pytest.mark.slow
def test_new_combinations_learn_the_same_together_as_alone(jobs: Jobs, tmp_path: Path) -> None:
    specs = combined()
    alone, together = tmp_path / "alone", tmp_path / "together"
    jobs.finish(*jobs.start(specs[0], moved(specs[1], by=2), runs=alone))
    handles = jobs.start(*map(gated, specs), runs=together)
    waiting = list(handles)
    while waiting:
        for handle in tuple(waiting):
            still_runs(handle)
            if (together / handle.name / "metrics.jsonl").exists() and (found := replicas(handle)):
                ray.kill(found[0])
                gate(together / handle.name).touch()
                waiting.remove(handle)
    jobs.finish(*handles)
    for spec in specs:
        metrics = learnt(together / spec.name)
        assert metrics == learnt(alone / spec.name), f"{spec.name} has learnt something else than alone"
        assert all(m["value_loss"] > 0 and m["grad_norm"] > 0 for m in metrics)
    assert [m["staleness_max"] for m in learnt(together / "ahead_ppo")] == [0, 1, 1, 1]
    assert sum(m["env_faults"] for m in rows(together / "agent_ppo" / "metrics.jsonl")) >= 3
