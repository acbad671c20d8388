"""Base classes of modules that a `rlix.TrainEngine` trains: plain PyTorch modules that know their place in the layout.

A module is written as for one process and one device. Its class goes to the workers, where it is built, filled with
weights and sharded; its methods are then called on the engine. Used without an engine, every helper here does what one
process would.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Reduction = Literal["gather", "first", "mean", "sum", "all"]
F = TypeVar("F", bound=Callable[..., Any])

_RETURNS = "_rlix_returns"
_CONFIGURES = "_rlix_configures"
_UNDOES = "_rlix_undoes"


def returns(reduction: Reduction) -> Callable[[F], F]:
    """Choose how the engine combines what a method returns on each data-parallel rank.

    `gather`: concatenated in input order (lists, tensors, arrays; dicts key by key; scalars become a list with one per
    rank). `first`: rank 0's. `mean`: averaged, each rank weighted by its share of the split batch. `sum`. `all`: a list
    with one result per rank. Default: `gather` when an argument was split with `NeedParallel`, else `first`.
    """

    def mark(method: F) -> F:
        setattr(method, _RETURNS, reduction)
        return method

    return mark


def reduction_of(method: Callable[..., Any]) -> Reduction | None:
    """What `returns` chose for a method, if anything."""
    reduction: Reduction | None = getattr(method, _RETURNS, None)
    return reduction


def configures(method: F) -> F:
    """Mark a method that makes optimizers or schedulers, or sets what `training_state` does not return.

    An engine that is built anew (`TrainEngine.resize`) calls such methods again, with the arguments they had, in the
    order they were called, before it takes the state back.
    """
    setattr(method, _CONFIGURES, True)
    return method


def undoes(configuring: str) -> Callable[[F], F]:
    """Mark a method that takes back what the method `configuring` did with the same first argument: an engine that is
    built anew calls neither of them again."""

    def mark(method: F) -> F:
        setattr(method, _UNDOES, configuring)
        return method

    return mark


def undone_by(method: Callable[..., Any]) -> str | None:
    """The name of the method that this one takes back, if any."""
    undone: str | None = getattr(method, _UNDOES, None)
    return undone


def is_configuring(method: Callable[..., Any]) -> bool:
    return getattr(method, _CONFIGURES, False)


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """A rank's process groups by purpose; None where this rank is alone in it.

    `data`: ranks that compute on different parts of a batch. `tensor`: ranks that compute on one part together, each
    with a part of every layer. `sequence`: each on a stretch of every sequence; they have the same batch, and compute
    the same loss.
    """

    world: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class TrainContext:
    """A module's place in its engine. `dp_rank` of `dp_size`: which part of a split batch this rank computes on."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    device: torch.device | None = None
    groups: ProcessGroups = ProcessGroups()


class BaseTrainModule(nn.Module):
    """Mixin: a module whose methods are called on a `TrainEngine`.

    FSDP averages gradients over all data-parallel ranks, so a loss that is a mean over the *global* batch must be
    written with `global_mean`; a plain local mean is the same only when every rank holds equally many items.

    Optimizers and learning-rate schedulers that are attributes of the module or of its submodules, or are in a list,
    tuple or dictionary that is one, are found there: they move with the engine and are part of its checkpoints.
    """

    context: TrainContext = TrainContext()
    rlix_init: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    allow_missing: tuple[str, ...] = ()
    """Patterns (fnmatch) of parameters a checkpoint need not hold, such as a new head; they keep a seeded init."""
    allow_unknown: tuple[str, ...] = ()
    """Patterns (fnmatch) of what a checkpoint may hold besides, such as the head of another kind of model."""
    publish_dtype: torch.dtype | None = None
    """In which floating-point parameters are published, whatever they are trained in; None: as they are."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Remembered so that the workers can build the same module from a driver's copy without weights.
        self = super().__new__(cls)
        object.__setattr__(self, "rlix_init", (args, kwargs))
        return self

    # ---- hooks -------------------------------------------------------------------------------------------------

    def on_weights_materialized(self) -> None:
        """Called on each worker once weights are on the device and sharded: create optimizers here."""

    def export_name(self, name: str) -> str:
        """The published or saved name of a parameter, given its name in this module."""
        return name

    def import_name(self, name: str) -> str:
        """The name in this module of a parameter, given its name in a checkpoint."""
        return name

    def training_state(self) -> dict[str, Any]:
        """Further state to resume from, as JSON values (a step count, say)."""
        return {}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Take back what `training_state` returned."""

    def non_split_modules(self) -> tuple[str, ...]:
        """Class names of submodules that are gathered whole, one at a time (transformer blocks)."""
        return ()

    # ---- place in the layout -----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        if self.context.device is not None:
            return self.context.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def dp_rank(self) -> int:
        return self.context.dp_rank

    @property
    def dp_size(self) -> int:
        """Number of parts that a split batch has."""
        return self.context.dp_size

    # ---- reductions over data-parallel ranks -------------------------------------------------------------------

    def dp_sum(self, value: torch.Tensor | float) -> torch.Tensor:
        """The sum of a number or tensor over data-parallel ranks, detached. All ranks must call it."""
        return self._all_reduce(value, dist.ReduceOp.SUM)

    def dp_mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """The plain mean of a number or tensor over data-parallel ranks, detached. All ranks must call it."""
        return self._all_reduce(value, dist.ReduceOp.SUM) / self.dp_size

    def dp_max(self, value: torch.Tensor | float) -> torch.Tensor:
        """The maximum over data-parallel ranks, so that ranks can agree on a number of micro-batches, for instance."""
        return self._all_reduce(value, dist.ReduceOp.MAX)

    def global_mean(
        self, values: torch.Tensor, mask: torch.Tensor | None = None, *, total: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """A loss whose gradient, averaged by FSDP, is that of the mean over the global batch.

        `values` are per item (or token), `mask` weights them. `total` is the global sum of weights; give it when the
        batch is accumulated over several micro-batches (`dp_sum(mask.sum())` over all of them), else it is computed.
        The value is local_sum * dp_size / total: its `dp_mean` is the global mean.
        """
        weights = torch.ones_like(values) if mask is None else mask.to(values.dtype)
        if total is None:
            total = self.dp_sum(weights.sum())
        return (values * weights).sum() * self.dp_size / total

    def sync_gradients(self, last: bool) -> None:
        """Say before each backward pass of several, whose gradients add up, whether it is the last one.

        Shards are summed over their ranks in every pass, so that no rank ever holds whole gradients; copies of a model
        (HSDP) are averaged once, in the last. Ranks must do equally many passes.
        """
        if isinstance(self, FSDPModule):
            self.set_requires_all_reduce(last)
            self.set_is_last_backward(last)

    def clip_grad_norm(self, max_norm: float, parameters: Iterable[nn.Parameter] | None = None) -> torch.Tensor:
        """Scale gradients to a global L2 norm of at most `max_norm`; return the norm before. All ranks call it.

        `torch.nn.utils.clip_grad_norm_` refuses parameters on different device meshes; here the norm is taken mesh by
        mesh and the parts are combined. Parameters whose attribute `tensor_model_parallel` is true hold different
        parts of a whole on each rank of the tensor group.
        """
        chosen = [p for p in (self.parameters() if parameters is None else parameters) if p.grad is not None]
        grads = [p.grad for p in chosen if p.grad is not None]
        tensor = self.context.groups.tensor
        if tensor is None:
            total = global_norm(grads)
        else:
            parts = [p.grad for p in chosen if p.grad is not None and getattr(p, "tensor_model_parallel", False)]
            wholes = [p.grad for p in chosen if p.grad is not None and not getattr(p, "tensor_model_parallel", False)]
            squared = global_norm(parts).to(self.device).square()
            dist.all_reduce(squared, group=tensor)
            total = (squared + global_norm(wholes).to(self.device).square()).sqrt()
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(scale.to(local.dtype))
        return total

    def _all_reduce(self, value: torch.Tensor | float, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        tensor = torch.as_tensor(value, device=self.device).detach().clone()
        if not tensor.is_floating_point():
            tensor = tensor.double()
        if self.dp_size > 1:
            dist.all_reduce(tensor, op, group=self.context.groups.data)
        return tensor


class HuggingFaceFsdp2TrainModule(BaseTrainModule):
    """Mixin before a transformers model class: `class Policy(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # transformers chooses a model's loss by the name of its class, which a subclass changes.
        if getattr(self, "loss_type", None) is None:
            from transformers.loss.loss_utils import LOSS_MAPPING

            names = [base.__name__ for base in type(self).__mro__ if base.__module__.startswith("transformers.models.")]
            self.loss_type = next((kind for kind in LOSS_MAPPING if any(kind in name for name in names)), None)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for its decorator in the file of a class: of a user's class, the model's own counts."""
        models = (base for base in cls.__mro__ if base.__module__.startswith("transformers.models."))
        return any(base._can_set_experts_implementation() for base in models)  # type: ignore[attr-defined]

    def non_split_modules(self) -> tuple[str, ...]:
        return tuple(getattr(self, "_no_split_modules", None) or ())


def global_norm(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """L2 norm over gradients that may be sharded over different meshes; the same on every rank."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        groups.setdefault(key, []).append(grad)
    norms = [_full(torch.nn.utils.get_total_norm(group)) for group in groups.values()]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
