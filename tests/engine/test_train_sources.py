"""What a training module says of itself: where its weights come from, and which optimizers it has."""

from pathlib import Path

import pytest
import torch

from rlix.engine.train import checkpoint
from rlix.engine.train.engine import TrainEngine
from rlix.engine.train.materialize import module_description
from rlix.engine.train.optimizers import optimizers, schedulers
from rlix.engine.train.weights_source import weights_folder
from rlix.nn import BaseTrainModule
from rlix.protocol.errors import SpecError
from tests.engine import models
from tests.engine.training_models import Policy


def test_weights_come_from_where_the_configuration_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.folder(tmp_path / "model", 0)
    other = models.folder(tmp_path / "other", 1)
    module_class, (config,), _ = module_description((Policy, tmp_path / "model"))
    assert module_class is Policy
    assert weights_folder("Policy", (3, config), None) == str(tmp_path / "model")
    assert weights_folder("Policy", (config,), other) == str(other)
    assert weights_folder("Policy", (models.qwen(),), None) is None
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"configuration of Policy comes from .*model.*random_weights=True"):
        weights_folder("Policy", (config,), None)
    with pytest.raises(FileNotFoundError, match="Hugging Face model folder"):
        weights_folder("Policy", (config,), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no model folder .*gone: give a folder"):
        TrainEngine((Policy, tmp_path / "gone"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config._name_or_path = "nobody/nothing"
    with pytest.raises(FileNotFoundError, match=r"comes from nobody/nothing, which is no folder here"):
        weights_folder("Policy", (config,), None)


class Parts(BaseTrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        self.frozen = torch.nn.Parameter(torch.ones(2))
        made = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in (self.body, self.head)]
        self.all = made
        self.by_name = {"head": made[1]}  # the same one again
        self.head.own = torch.optim.SGD([self.frozen], lr=0.1, momentum=0.9)
        self.schedules = tuple(torch.optim.lr_scheduler.ConstantLR(optimizer) for optimizer in made)

    def step(self) -> None:
        self.head(self.body(torch.ones(2, 3))).sum().backward()
        for optimizer in optimizers(self).values():
            optimizer.step()
            optimizer.zero_grad()


def test_optimizers_are_found_in_containers_and_submodules_once(tmp_path: Path) -> None:
    module = Parts()
    assert list(optimizers(module)) == ["all.0", "all.1", "head.own"]
    assert list(schedulers(module)) == ["schedules.0", "schedules.1"]
    module.step()
    checkpoint.save_state(module, tmp_path / "state")
    module.step()
    other = Parts()
    checkpoint.load_state(other, tmp_path / "state")
    assert other.head.own.state == {}  # as its parameter never had a gradient
    other.step()
    for one, two in zip(module.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_a_parameter_that_was_never_stepped_has_no_state_after_loading_either(tmp_path: Path) -> None:
    module = Parts()
    module.all[0].add_param_group({"params": [module.frozen]})
    module.step()
    checkpoint.save_state(module, tmp_path / "state")
    other = Parts()
    other.all[0].add_param_group({"params": [other.frozen]})
    checkpoint.load_state(other, tmp_path / "state")
    assert other.frozen not in other.all[0].state
    assert other.body.weight in other.all[0].state


def test_sequences_that_cannot_be_cut_so_are_refused_before_workers_start() -> None:
    engine = TrainEngine((Policy, models.qwen()))  # 2 key heads
    with pytest.raises(ValueError, match=r"sequence_parallel_size=3 must divide the .* and 2 key heads"):
        engine.build(sequence_parallel_size=3, shard=3)


def test_a_training_backend_that_is_none_is_one_sentence() -> None:
    for wrong in ("nowhere:Mine", "pathlib:Nobody"):
        with pytest.raises(SpecError, match="must be module:Class"):
            TrainEngine((Policy, models.qwen()), wrong)
