"""The critic on one process: it starts from a policy's folder, and learns."""

from pathlib import Path

import torch

from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.pipeline.batch import collate
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.spec.model import TinyModel
from rlix.pipeline.spec.training import OptimizerSpec
from rlix.pipeline.training.critic import CriticBatch, CriticModule, critic_on_meta


def test_a_critic_takes_the_policys_trunk_and_learns_values(tmp_path: Path) -> None:
    folder = write_tiny_model(TinyModel(), tmp_path / "model", seed=0)
    meta = critic_on_meta(folder)
    args, kwargs = meta.rlix_init
    spec = ModuleSpec(module_class=type(meta), args=args, kwargs=kwargs, weights_path=str(folder))
    critic = build_module(spec, torch.device("cpu"), None)
    assert isinstance(critic, CriticModule)
    critic.configure_optimizer(OptimizerSpec(learning_rate=1e-2))
    rows = [((1, 5, 14, 5, 2), (False,) * 3 + (True,) * 2), ((1, 6, 14, 6, 7, 2), (False,) * 3 + (True,) * 3)]
    tokens = collate(rows, pad_id=0)
    values = critic.values(tokens)
    assert values.shape == tokens["mask"].shape
    batch = CriticBatch(**tokens, old_values=values, returns=torch.ones_like(values))
    losses = [critic.critic_step(batch, 5.0, None, "token", 1.0)["value_loss"] for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]
