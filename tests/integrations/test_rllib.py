"""Real RLlib, plain and as a job of the pool: the same learning to the bit, and elastic sampling with whole batches."""

from pathlib import Path
from typing import Any

import pytest
import ray

import rlix
from rlix.monitor.records import load_run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
]

BATCH = 400


def config(runners: int) -> Any:
    from ray.rllib.algorithms.ppo import PPOConfig  # takes seconds, which only who runs these tests should pay

    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=1)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=BATCH, minibatch_size=100, num_epochs=2, lr=1e-3)
        .debugging(seed=1, log_level="ERROR")
    )


def trained(made: Any, steps: int) -> tuple[list[Any], Any]:
    """Of each step how many environment steps it had and what was lost; and the algorithm."""
    algorithm = made.build_algo()
    return steps_of(algorithm, steps), algorithm


def steps_of(algorithm: Any, steps: int) -> list[Any]:
    results = [algorithm.train() for _ in range(steps)]
    return [
        (r["env_runners"]["num_env_steps_sampled"], float(r["learners"]["default_policy"]["total_loss"]))
        for r in results
    ]


def weights(algorithm: Any) -> list[Any]:
    found = algorithm.learner_group.get_weights()["default_policy"]
    return [found[name].tolist() for name in sorted(found)]


def test_ppo_learns_the_same_as_a_job(ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    expected, plain = trained(config(0), 2)
    plain.stop()
    found, algorithm = trained(rlix.rllib(config(0), "ppo", runs_dir=str(tmp_path)), 2)
    assert found == expected
    job = algorithm._rlix
    assert (job.stages.stage, job.learners.on_device, job.learners.device_bytes()) == (None, False, 0)
    saved = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    algorithm.stop()
    assert Path(saved).is_dir()
    record = load_run(tmp_path / "ppo")
    assert (record.state, len(record.metrics)) == ("finished", 2)
    assert {lease.phase for lease in record.leases} == {"initialization", "actor_training"}


def test_runners_come_and_go_and_batches_stay_whole(
    ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    found, algorithm = trained(rlix.rllib(config(2), "elastic", elastic=True, runs_dir=str(tmp_path)), 2)
    assert [steps for steps, _ in found] == [BATCH, BATCH]
    sizes = algorithm._rlix.sampler.sizes
    assert sizes
    assert set(sizes) <= {1, 2}
    assert algorithm._rlix.program.client.leases() == ()
    algorithm.stop()


def overlapping(made: Any) -> Any:
    return (
        made.environment("CartPole-v1")
        .env_runners(num_env_runners=0, rollout_fragment_length=50)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=100, lr=1e-3)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=BATCH)
        .debugging(seed=1, log_level="ERROR")
    )


def test_learners_with_a_thread_of_their_own_learn_under_leases(
    ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IMPALA's learns the same to the bit; APPO's learns: it draws batches from its buffer by chance."""
    from ray.rllib.algorithms.appo import APPOConfig
    from ray.rllib.algorithms.impala import IMPALAConfig

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    expected, plain = trained(overlapping(IMPALAConfig()), 2)
    plain.stop()
    for made in (IMPALAConfig(), APPOConfig()):
        algorithm = rlix.rllib(overlapping(made), type(made).__name__, runs_dir=str(tmp_path)).build_algo()
        first = weights(algorithm)
        found = steps_of(algorithm, 2)
        assert weights(algorithm) != first
        assert found == expected or isinstance(made, APPOConfig)
        job = algorithm._rlix
        assert (job.stages.stage, job.learners.device_bytes()) == (None, 0)
        algorithm.stop()
        record = load_run(tmp_path / type(made).__name__)
        assert {lease.phase for lease in record.leases} == {"initialization", "actor_training"}
