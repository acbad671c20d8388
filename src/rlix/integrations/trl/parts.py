"""A trainer's bytes, by what needs them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlix.engine.guarded import GuardedSet, Named, named_tensors, tensors_within
from rlix.engine.movers import Mover


@dataclass(frozen=True, slots=True)
class Parts:
    """Each begins on the device.

    `policy`: weights and buffers. `training`: gradients and optimizer state. `batch`: what was generated and is still
    to be learnt from. `reference`, `rewards`: models that only compute.
    """

    policy: GuardedSet
    training: GuardedSet
    batch: GuardedSet
    reference: GuardedSet
    rewards: GuardedSet

    @property
    def learning(self) -> tuple[GuardedSet, ...]:
        return self.policy, self.training, self.batch

    @property
    def all(self) -> tuple[GuardedSet, ...]:
        return self.policy, self.training, self.batch, self.reference, self.rewards


def parts_of(trainer: Any, owner: str, new_mover: Callable[[], Mover] | None = None) -> Parts:
    """`trainer` is a transformers `Trainer`, or derived from it."""
    device = trainer.accelerator.device

    def guarded(name: str, named: Callable[[], Named]) -> GuardedSet:
        return GuardedSet(f"the {name} of {owner}", named, device, mover=new_mover() if new_mover else None)

    def modules(found: object) -> Named:
        listed = found if isinstance(found, list | tuple) else [found]
        return named_tensors(*(each for each in listed if isinstance(each, torch.nn.Module)))

    def of_policy() -> Named:
        return ((name, tensor) for name, tensor in named_tensors(trainer.model) if not name.startswith("gradient"))

    def of_training() -> Named:
        gradients = ((name, tensor) for name, tensor in named_tensors(trainer.model) if name.startswith("gradient"))
        return (*gradients, *named_tensors(trainer.optimizer))

    return Parts(
        policy=guarded("policy", of_policy),
        training=guarded("policy's training", of_training),
        batch=guarded("batch", lambda: tensors_within("tensor", getattr(trainer, "_buffered_inputs", None))),
        reference=guarded("reference model", lambda: modules(getattr(trainer, "ref_model", None))),
        rewards=guarded("reward models", lambda: modules(getattr(trainer, "reward_funcs", None))),
    )
