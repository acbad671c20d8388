"""The same losses and gradients on two and four ranks with unequal parts (`test_train_modules` has one), and bf16 over
float32 weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlix.engine.parallel import NeedParallel
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights import publication
from rlix.pipeline.spec.training import OptimizerSpec, TrainingSpec
from rlix.pipeline.training.policy import policy_on_meta
from tests.pipeline import plain_training as plain
from tests.pipeline.test_train_modules import BATCH, CASES, TOKENS, same
from tests.pipeline.training_scenarios import (
    CLIP,
    TEMPERATURE,
    critic,
    critic_tensors,
    expected_critic,
    expected_policy,
    policy,
    scenario,
    write_model,
)

pytestmark = [pytest.mark.ray]

LAYOUTS: dict[str, Any] = {
    "two shards": {"shard": 2},
    "two copies of two shards": {"shard": 2, "data_parallel_size": 4},
    "two parts in two stretches": {"sequence_parallel_size": 2, "data_parallel_size": 2, "shard": 4},
}
SMALL = TrainingSpec(micro_batch_tokens=20)  # the ranks' rows need different numbers of micro-batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "ranks")


@pytest.fixture(scope="module", params=LAYOUTS)
def engines(request: pytest.FixtureRequest, ray_session: Any, folder: Path) -> Iterator[dict[str, TrainEngine]]:
    sizes = LAYOUTS[request.param]
    made = {"policy": TrainEngine(policy(folder)), "critic": TrainEngine(critic(folder))}
    try:
        for engine in made.values():
            engine.build(**sizes, weights_path=folder)
        yield made
    finally:
        for engine in made.values():
            engine.close()


@pytest.mark.parametrize("training", [TrainingSpec(), SMALL], ids=["one pass", "micro-batches"])
def test_every_loss_and_gradient(engines: dict[str, TrainEngine], training: TrainingSpec, folder: Path) -> None:
    engine = engines["policy"]
    engine.configure_optimizer(OptimizerSpec(), training)
    for name, aggregation in CASES:
        wanted = scenario(name, BATCH, aggregation)
        given = NeedParallel(wanted.tensors)
        metrics = engine.policy_step(given, wanted.denominator, wanted.algorithm, TEMPERATURE, 1.0)
        loss, gradients = expected_policy(folder, BATCH, wanted)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6), name
        same(engine.gradients(), gradients)


@pytest.mark.parametrize("training", [TrainingSpec(), SMALL], ids=["one pass", "micro-batches"])
def test_the_critic(engines: dict[str, TrainEngine], training: TrainingSpec, folder: Path) -> None:
    engine = engines["critic"]
    engine.configure_optimizer(OptimizerSpec(), training)
    head = engine.state_dict()["score.weight"]
    metrics = engine.critic_step(NeedParallel(critic_tensors(BATCH)), TOKENS, CLIP, "token", 1.0)
    loss, gradients = expected_critic(folder, BATCH, head, "token")
    assert metrics["value_loss"] == pytest.approx(loss, abs=1e-6)
    same(engine.gradients(), gradients)


def test_log_probs(engines: dict[str, TrainEngine], folder: Path) -> None:
    engine = engines["policy"]
    engine.configure_optimizer(OptimizerSpec(), SMALL)
    given = engine.log_probs(NeedParallel({"input_ids": BATCH.ids, "mask": BATCH.mask}), TEMPERATURE)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = plain.token_log_probs(model, BATCH.ids, TEMPERATURE).detach() * BATCH.mask
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


UPDATES = 12


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """The share of numbers that are not what they were."""
    changed = sum(int((after[name] != tensor).sum()) for name, tensor in before.items())
    return changed / sum(tensor.numel() for tensor in before.values())


def trained(folder: Path, dtype: str) -> tuple[float, TrainEngine]:
    engine = TrainEngine(policy_on_meta(folder))
    engine.build(shard=2, weights_path=folder, dtype=dtype, compute_dtype="bfloat16")
    training = TrainingSpec(offload_optimizer=True, activation_checkpointing=True)
    engine.configure_optimizer(OptimizerSpec(learning_rate=1e-6), training, UPDATES, "bfloat16")
    before = engine.state_dict()
    wanted = scenario("grpo", BATCH)
    for _ in range(UPDATES):
        metrics = engine.policy_step(
            NeedParallel(wanted.tensors), wanted.denominator, wanted.algorithm, TEMPERATURE, 1.0
        )
        assert metrics["grad_norm"] > 0
    return moved(before, engine.state_dict()), engine


def test_bfloat16_computes_over_float32_weights_all_of_which_move(ray_session: Any, folder: Path) -> None:
    share, engine = trained(folder, "float32")
    published = {entry.name: tensor for entry, tensor in publication.stream(engine.publish(1))}
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    weights = engine.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name].bfloat16(), tensor) for name, tensor in published.items())
    engine.close()
    without, engine = trained(folder, "bfloat16")
    engine.close()
    assert share > 0.98
    assert without < 0.1
