"""A trainer's phases from outside: leases around the methods in which it touches the device.

A callback cannot do it: no event of the trainer lies between generation and the loss. So methods of the one object are
wrapped. What a script or a callback does with the tensors outside of those gets a lease, too (`Stages.lent`).
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import TrainerCallback

from rlix.integrations.leases import Stage, Stages
from rlix.integrations.trl.parts import Parts
from rlix.integrations.trl.served import ServedGeneration
from rlix.protocol.errors import SpecError
from rlix.protocol.types import Phase

INITIALIZATION = Stage("initialization", Phase.INITIALIZATION)
# Generation by the trainer itself cannot be preempted, so it is a gang: the least urgent one.
GENERATION = Stage("rollout", Phase.VALUE_COMPUTE)
LOG_PROBS = Stage("old_log_probs", Phase.OLD_LOG_PROBS)
REFERENCE = Stage("reference_log_probs", Phase.REFERENCE_LOG_PROBS)
REWARDS = Stage("reward", Phase.REFERENCE_LOG_PROBS)
EVALUATION = Stage("evaluation", Phase.OLD_LOG_PROBS)
TRAINING = Stage("actor_training", Phase.ACTOR_TRAINING)

OnLog = Callable[[int, Mapping[str, object], int], None]
"""Step (from 0), metrics, and how many steps there will be."""
Around = Callable[..., AbstractContextManager[None]]


def refuse_kind(kind: type) -> None:
    """Before one is built. Raises SpecError for trainers that generate in the background, which no lease surrounds."""
    if "AsyncGRPOTrainer" in {each.__name__ for each in kind.__mro__}:
        raise SpecError(
            f"rlix.trl: {kind.__name__} trains while a vLLM server of yours generates, and is not supported; use "
            "GRPOTrainer with use_vllm=True, which the job's own replicas serve"
        )


def _is_served(trainer: Any) -> bool:
    return isinstance(getattr(trainer, "vllm_generation", None), ServedGeneration)


def _refuse_layout(trainer: Any) -> None:
    """Weights that are elsewhere than in the model's own tensors cannot be moved from outside."""
    found = {
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "a quantized model": getattr(trainer.model, "is_quantized", False),
        "use_vllm": getattr(trainer, "use_vllm", False) and not _is_served(trainer),
    }
    if wrong := [name for name, used in found.items() if used]:
        what = f"{' and '.join(wrong)} is not supported in {type(trainer).__name__}"
        raise SpecError(f"rlix.trl: {what}: its bytes could not leave the devices")


class Attachment:
    """Wraps one trainer; its bytes are on the device, under the stage that is held."""

    def __init__(self, trainer: Any, parts: Parts, stages: Stages, on_log: OnLog | None = None) -> None:
        _refuse_layout(trainer)
        self.trainer = trainer
        self.parts = parts
        self.stages = stages
        self.served: ServedGeneration | None = trainer.vllm_generation if _is_served(trainer) else None
        if self.served is not None:
            self.served.seed = trainer.args.seed
        stages.add(*parts.all)
        for each in parts.all:
            each.lend = stages.lent
        self._wrap_life()
        names = {each.__name__ for each in type(trainer).__mro__}
        if "OnlineDPOTrainer" in names:
            self._wrap_online_dpo()
        elif names & {"GRPOTrainer", "RLOOTrainer"}:
            self._wrap_group()
        else:
            self._wrap_any()
        trainer.add_callback(_Boundaries(self, on_log))

    def train(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.train`: it begins with preparing and, where it resumes, loading; the first stage ends that."""
        self.stages.begin(INITIALIZATION, *self.parts.all)
        try:
            return inner(*args, **kwargs)
        finally:
            self.stages.end()

    # ---- every trainer ---------------------------------------------------------------------------------------

    def _wrap_life(self) -> None:
        trainer, parts = self.trainer, self.parts
        self._around(trainer.accelerator, "prepare", self._preparing)
        self._around(trainer.accelerator, "prepare_model", self._preparing)
        self._around(trainer, "_load_best_model", self._during(INITIALIZATION, *parts.all))
        # To save, nothing has to be on the device.
        self._around(trainer, "_save_checkpoint", lambda *_, **__: self.stages.readable())
        self._around(trainer, "save_model", lambda *_, **__: self.stages.readable())
        for callback in trainer.callback_handler.callbacks:
            if type(callback).__name__ == "SyncRefModelCallback":  # writes the reference at the end of a step
                self._around(callback, "on_step_end", lambda *_, **__: self.stages.beside(parts.reference))

    def _preparing(self, *prepared: object, **_: object) -> AbstractContextManager[None]:
        if any(isinstance(each, torch.nn.Module) for each in prepared):
            return self.stages.within(INITIALIZATION, *self.parts.all)
        return nullcontext()

    def _wrap_any(self) -> None:
        """A lease from the loss to the optimizer's step, with everything."""
        self._around(self.trainer, "compute_loss", self._loss(*self.parts.all))
        self._around(self.trainer, "prediction_step", self._during(EVALUATION, *self.parts.all))

    # ---- GRPO and RLOO ---------------------------------------------------------------------------------------

    def _wrap_group(self) -> None:
        trainer, parts = self.trainer, self.parts
        generation = self._during(GENERATION, parts.policy) if self.served is None else self._with_weights_out
        self._around(trainer, "_generate", generation)
        self._around(trainer, "_get_per_token_logps_and_entropies", self._log_probs)
        self._around(trainer, "compute_loss", self._loss(*parts.learning))
        if any(isinstance(each, torch.nn.Module) for each in trainer.reward_funcs):
            self._around(trainer, "_calculate_rewards", self._during(REWARDS, parts.rewards))

    def _with_weights_out(self, *_: object, **__: object) -> AbstractContextManager[None]:
        """Generation is elsewhere, on devices that this job must not hold meanwhile."""
        self.publish()
        self.stages.end()
        return nullcontext()

    def publish(self) -> None:
        """The replicas generate with the weights of this step; nothing happens when they do already."""
        step = self.trainer.state.global_step
        if self.served is not None and self.served.version != step:
            if self.stages.stage == TRAINING:
                self.served.publish(step)
            else:
                with self.stages.within(LOG_PROBS, self.parts.policy):
                    self.served.publish(step)

    def _log_probs(self, model: object, *_: object, **__: object) -> AbstractContextManager[None]:
        """With PEFT the reference is the policy without its adapter, and looks like it."""
        if model is getattr(self.trainer, "ref_model", None):
            return self.stages.within(REFERENCE, self.parts.reference)
        if self.stages.stage in (TRAINING, EVALUATION):  # as part of the loss
            return nullcontext()
        return self.stages.within(LOG_PROBS, self.parts.policy)

    # ---- online DPO ------------------------------------------------------------------------------------------

    def _wrap_online_dpo(self) -> None:
        """Reference and rewards come between the policy's forward and backward, so the lease is held throughout."""
        trainer, parts = self.trainer, self.parts
        self._around(trainer, "_generate", self._during(GENERATION, parts.policy))
        self._around(trainer, "_forward", self._forward)
        self._around(trainer, "_calculate_rewards_from_functions", lambda *_, **__: self.stages.beside(parts.rewards))
        self._around(trainer, "prediction_step", self._during(EVALUATION, *parts.all))

    def _forward(self, model: object, *_: object, **__: object) -> AbstractContextManager[None]:
        if model is self.trainer.ref_model:
            return self.stages.beside(self.parts.reference)
        self.stages.begin(TRAINING, *self.parts.learning)  # until the step ends, or more is generated
        return nullcontext()

    # ---- below -----------------------------------------------------------------------------------------------

    def _loss(self, *sets: Any) -> Around:
        def around(*_: object, **__: object) -> AbstractContextManager[None]:
            if not self.trainer.model.training:
                return self.stages.within(EVALUATION, *sets)
            self.stages.begin(TRAINING, *sets)  # through backward and accumulation, until the step ends
            return nullcontext()

        return around

    def _during(self, stage: Stage, *sets: Any) -> Around:
        return lambda *_, **__: self.stages.within(stage, *sets)

    @staticmethod
    def _around(owner: Any, method: str, around: Around) -> None:
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            with around(*args, **kwargs):
                return inner(*args, **kwargs)

        setattr(owner, method, outer)


class _Boundaries(TrainerCallback):
    """Ends stages where the trainer's loop says so. It is the last callback: others may use the weights."""

    def __init__(self, attachment: Attachment, on_log: OnLog | None) -> None:
        self._attachment = attachment
        self._on_log = on_log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        callbacks = self._attachment.trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.append(self)
        self._attachment.stages.end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.publish()
        self._attachment.stages.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._on_log is not None and logs and "loss" in logs:
            self._on_log(state.global_step - 1, logs, state.max_steps)
