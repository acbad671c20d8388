"""What the policy and the critic have in common: an optimizer, and passes over a batch in parts that fit in memory."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlix.engine.declared import AS_IT_IS, Deadlines, DeclaredSpeed
from rlix.engine.residency import HostHome
from rlix.nn import HuggingFaceFsdp2TrainModule, configures
from rlix.pipeline.algorithms.tensors import Terms
from rlix.pipeline.spec.training import OptimizerSpec, TrainingSpec
from rlix.pipeline.training.metrics import LATE, MOST, SKIPPED, TOKENS
from rlix.pipeline.training.micro_batches import MicroBatch, ModelInputs, micro_batches, model_inputs, plan, row_lengths
from rlix.pipeline.training.parameter_groups import ParameterGroup, parameter_groups
from rlix.pipeline.training.schedule import learning_rate_factor

logger = logging.getLogger(__name__)


class OptimizedModule(HuggingFaceFsdp2TrainModule):
    """A model with an AdamW that is configured once the weights are there; see `TrainingSpec` for how it computes."""

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    training_spec: TrainingSpec = TrainingSpec()
    skipped_updates: int = 0
    speed: DeclaredSpeed = AS_IT_IS

    @configures
    def declare_speed(self, speed: DeclaredSpeed) -> None:
        """How long passes over a batch last at least, on a virtual GPU."""
        self.speed = speed

    @configures
    def configure_optimizer(
        self,
        spec: OptimizerSpec,
        training: TrainingSpec | None = None,
        updates: int | None = None,
        publish_dtype: str | None = None,
    ) -> None:
        """`updates`: optimizer steps of the whole job, over which the learning rate falls if it is to.

        `publish_dtype`: of the weights that rollouts get, by torch's name; None: as they are trained.
        """
        if publish_dtype is not None:
            self.publish_dtype = getattr(torch, publish_dtype)
        if training is not None:
            self.training_spec = training
            self._compute_as(training)
        self.optimizer = self.new_optimizer(spec)
        factor = learning_rate_factor(spec, updates or 1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def adjust_optimizer(self, spec: OptimizerSpec, updates: int) -> None:
        """After a state was loaded that was saved with other numbers: go on with these."""
        adjust(self.optimizer, self.scheduler, parameter_groups(self._trained(), spec), spec, updates)

    def new_optimizer(self, spec: OptimizerSpec) -> torch.optim.Optimizer:
        trained = self._trained()
        groups: list[dict[str, Any]] = [
            {
                "params": [trained[name] for name in group.names],
                "lr": group.learning_rate,
                "weight_decay": group.weight_decay,
            }
            for group in parameter_groups(trained, spec)
        ]
        # foreach: the fused multi-tensor path refuses parameters sharded over different meshes
        return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, foreach=False)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    # ---- a batch in parts --------------------------------------------------------------------------------------

    def micro_batches(self, batch: Mapping[str, Tensor]) -> list[MicroBatch]:
        """This rank's rows in parts within the token budget; as many parts on every rank."""
        spec = self.training_spec
        groups = plan(row_lengths(batch["mask"]), spec.micro_batch_tokens, packed=spec.packing)
        return micro_batches(batch, groups, int(self.dp_max(len(groups))))

    def here(self, part: MicroBatch) -> dict[str, Tensor]:
        """Its tensors on this module's device."""
        return {name: tensor.to(self.device) for name, tensor in part.tensors.items()}

    def inputs(self, part: Mapping[str, Tensor]) -> ModelInputs:
        return model_inputs(part, packed=self.training_spec.packing)

    def gathered(self, batch: Mapping[str, Tensor], compute: Callable[[Mapping[str, Tensor]], Tensor]) -> Tensor:
        """What `compute` returns for each micro-batch, put together: [rows, length - 1], float32, on the CPU."""
        self.eval()
        result = torch.zeros(batch["mask"].shape)
        with Deadlines().lasting(_context(batch) * self.speed.scored_token_ms / 1e3):
            for part in self.micro_batches(batch):
                values = compute(self.here(part)).float().cpu()
                if part.rows:
                    result[torch.tensor(part.rows), : values.shape[1]] = values
        return result

    def accumulate(
        self, batch: Mapping[str, Tensor], loss_of: Callable[[Mapping[str, Tensor]], Terms]
    ) -> dict[str, float]:
        """Sum up the gradients of the losses of all micro-batches, each a part of the loss of the global batch.

        Returns this rank's part of the loss and of each metric's mean over the tokens of the global batch, or, of one
        that is called `_max`, of the largest value.
        """
        self.begin_training()
        tokens = self.dp_sum(batch["mask"].sum()).clamp(min=1)
        parts = self.micro_batches(batch)
        sums: dict[str, Tensor] = {"loss": torch.zeros((), device=self.device)}
        deadlines, declared_s = Deadlines(), _context(batch) * self.speed.trained_token_ms / 1e3
        with deadlines.lasting(declared_s):
            for number, part in enumerate(parts, start=1):
                self.sync_gradients(number == len(parts))
                tensors = self.here(part)
                loss, means = loss_of(tensors)
                loss.backward()
                sums["loss"] += loss.detach() / self.dp_size
                share = tensors["mask"].sum() / tokens
                for name, value in means.items():
                    if name.endswith(MOST):
                        sums[name] = torch.maximum(sums.get(name, value.detach()), value.detach())
                    else:
                        sums[name] = sums.get(name, 0.0) + value.detach() * share
        self.eval()
        late = {LATE: deadlines.late_s / self.dp_size} if declared_s else {}
        for name in [name for name in sums if name.endswith(MOST)]:
            sums[name] = self.dp_max(sums[name]) / self.dp_size
        return {name: float(value) for name, value in sums.items()} | {TOKENS: float(tokens) / self.dp_size} | late

    def begin_training(self) -> None:
        """Before passes that gradients come from."""
        self.train(self.training_spec.dropout)

    def update(
        self, metrics: Mapping[str, float], max_grad_norm: float, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, float]:
        """One optimizer step on the accumulated gradients; returns this rank's part of the metrics of a step.

        When the gradient's norm is not finite, which all ranks see alike, nothing is learnt, and only that is returned.
        """
        norm = self.clip_grad_norm(max_grad_norm)
        skip = not bool(torch.isfinite(norm))
        chosen = self.optimizer if optimizer is None else optimizer
        rate = chosen.param_groups[0]["lr"]
        if skip:
            self.skipped_updates += 1
            logger.warning(
                "the gradient's norm is %s: optimizer step left out (%d so far)", float(norm), self.skipped_updates
            )
        else:
            self.step_optimizer(chosen)
        chosen.zero_grad()
        if skip:
            return {SKIPPED: 1.0 / self.dp_size}
        of_step = {"grad_norm": float(norm), "learning_rate": rate, SKIPPED: 0.0}
        return {**metrics, **{name: value / self.dp_size for name, value in of_step.items()}}

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.training_spec.offload_optimizer:
            home: HostHome = self.__dict__.setdefault("_state_home", HostHome(self.device))
            home.visit(_state(optimizer))
            optimizer.step()
            home.leave(_state(optimizer))
        else:
            optimizer.step()
        if optimizer is self.optimizer:
            self.scheduler.step()

    @property
    def _model(self) -> Any:
        """This module as the transformers model that it is, too."""
        return self

    # ---- parts -------------------------------------------------------------------------------------------------

    def _compute_as(self, spec: TrainingSpec) -> None:
        if spec.attention != "sdpa":
            self._model.set_attn_implementation(spec.attention)
        if spec.activation_checkpointing:
            names = self.non_split_modules()
            for block in self.modules():
                if type(block).__name__.removeprefix("FSDP") in names:
                    block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _context(batch: Mapping[str, Tensor]) -> int:
    """Tokens of a batch, up to the last of each row that counts."""
    return sum(row_lengths(batch["mask"]))


def adjust(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    groups: Sequence[ParameterGroup],
    spec: OptimizerSpec,
    updates: int,
) -> None:
    """Have a loaded optimizer go on with the spec's numbers, at the place of the schedule where it is."""
    factor = learning_rate_factor(spec, updates)
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        rate = wanted.learning_rate * factor(scheduler.last_epoch)
        group |= {"initial_lr": wanted.learning_rate, "lr": rate}
        group |= {"betas": spec.betas, "weight_decay": wanted.weight_decay}
    scheduler.base_lrs = [group.learning_rate for group in groups]
    scheduler.lr_lambdas = [factor] * len(groups)


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What it keeps for each parameter; step counts, which are single numbers, stay where they are."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.dim()]
