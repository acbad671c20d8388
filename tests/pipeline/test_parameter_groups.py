"""Parameter groups: who decays, which pattern counts, and that a resumed optimizer goes on with new numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlix.pipeline.samples import Answer, End, Sample, Samples, Turn
from rlix.pipeline.spec.job import load_job
from rlix.pipeline.spec.training import GroupSpec, OptimizerSpec
from rlix.pipeline.training.parameter_groups import ParameterGroup, check_patterns, parameter_groups
from rlix.pipeline.training.schedule import learning_rate_factor
from rlix.protocol.errors import SpecError
from tests.pipeline.in_process import InProcess
from tests.pipeline.test_composition import job

SHAPES = {
    "embed.weight": torch.empty(4, 2),
    "layers.0.norm.weight": torch.empty(2),
    "layers.0.mlp.weight": torch.empty(2, 2),
    "lm_head.weight": torch.empty(4, 2),
    "lm_head.bias": torch.empty(4),
}


def spec_of(**changes: Any) -> OptimizerSpec:
    return OptimizerSpec(learning_rate=1e-3, weight_decay=0.1, **changes)


def test_norms_and_biases_do_not_decay() -> None:
    assert parameter_groups(SHAPES, spec_of()) == [
        ParameterGroup(("embed.weight", "layers.0.mlp.weight", "lm_head.weight"), 1e-3, 0.1),
        ParameterGroup(("layers.0.norm.weight", "lm_head.bias"), 1e-3, 0.0),
    ]


def test_the_first_pattern_counts_and_says_what_it_says() -> None:
    groups = {"lm_head.*": GroupSpec(learning_rate=1e-5), "*.weight": GroupSpec(weight_decay=0.2)}
    assert parameter_groups(SHAPES, spec_of(groups=groups)) == [
        ParameterGroup(("lm_head.weight",), 1e-5, 0.1),
        ParameterGroup(("lm_head.bias",), 1e-5, 0.0),
        ParameterGroup(("embed.weight", "layers.0.mlp.weight"), 1e-3, 0.2),
        ParameterGroup(("layers.0.norm.weight",), 1e-3, 0.2),
    ]
    check_patterns(list(SHAPES), spec_of(groups=groups))


@given(st.lists(st.sampled_from(["*", "embed*", "layers.*", "*.bias", "x"]), unique=True), st.floats(0, 1))
def test_every_parameter_is_in_one_group_whatever_the_numbers(patterns: list[str], decay: float) -> None:
    groups = {pattern: GroupSpec() for pattern in patterns}
    made = parameter_groups(SHAPES, OptimizerSpec(weight_decay=decay, groups=groups))
    assert sorted(name for group in made for name in group.names) == sorted(SHAPES)
    none = parameter_groups(SHAPES, OptimizerSpec(weight_decay=0.0, groups=groups))
    assert [group.names for group in made] == [group.names for group in none]


def test_an_optimizer_that_goes_on_takes_the_new_numbers(tmp_path: Path) -> None:
    pipeline = InProcess(job("task", "on_policy", "grpo", tmp_path, steps=2, warmup=None), tmp_path)
    pipeline.run_steps()
    module = pipeline.actor.module
    before = [dict(group) for group in module.optimizer.param_groups]
    module.adjust_optimizer(pipeline.spec.optimizer, pipeline.spec.updates)
    assert [dict(group) for group in module.optimizer.param_groups] == before
    wanted = spec_of(schedule="linear", betas=(0.8, 0.9))
    module.adjust_optimizer(wanted, 10)
    decaying, small = module.optimizer.param_groups
    assert decaying["lr"] == 1e-3 * learning_rate_factor(wanted, 10)(2) == 1e-3 * 0.8
    assert (decaying["weight_decay"], small["weight_decay"], small["betas"]) == (0.1, 0.0, (0.8, 0.9))
    module.optimizer.step()
    module.scheduler.step()
    assert decaying["lr"] == pytest.approx(1e-3 * 0.7)


def test_a_pattern_for_nothing_is_refused(tmp_path: Path) -> None:
    groups = {"groups": {"transformer.*": {"learning_rate": 1e-4}}}
    pipeline = InProcess(job("task", "on_policy", "grpo", tmp_path, optimizer=groups), tmp_path)
    with pytest.raises(
        SpecError, match=r"optimizer\.groups: no parameter is called 'transformer\.\*'; .* model\.embed"
    ):
        pipeline.setup()
    pipeline.teardown()


def test_adapters_have_no_groups(tmp_path: Path) -> None:
    optimizer = {"groups": {"lm_head*": {"learning_rate": 1.0}}}
    with pytest.raises(ValueError, match=r"optimizer\.groups: has no effect on an adapter"):
        job("task", "on_policy", "grpo", tmp_path, lora={}, optimizer=optimizer)


def test_a_mistake_in_a_group_is_said_by_its_pattern(tmp_path: Path) -> None:
    text = """
name: job
steps: 1
source: {task: sort_digits}
rollout: {max_new_tokens: 5}
clusters: {actor_train: {gpus: 1}}
optimizer: {groups: {"lm_head.*": {learning_rat: 1.0}}}
"""
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(
        SpecError, match=r"groups\.lm_head\.\*\.learning_rat: unknown key; did you mean 'learning_rate'"
    ):
        load_job(tmp_path / "job.yaml")


def test_spread_is_within_groups() -> None:
    def sample(reward: float, *, counts: bool = True) -> Sample:
        answer = Answer((4,), (-1.0,), (0,))
        return Sample("a", (Turn((1,), answer),), reward, False, End.DONE, counts=counts)

    rewards = [0.0, 1.0, 5.0, 5.0, 0.1, 0.1]
    made = Samples([*map(sample, rewards), sample(1.0), sample(9.0, counts=False)], 2)
    found = made.metrics()
    assert found["reward_std"] == 0.125  # 0.5, and three groups with nothing to compare
    assert found["groups_flat"] == 0.75
    assert "reward_std" not in Samples([sample(1.0)], 1).metrics()
