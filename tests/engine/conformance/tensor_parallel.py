"""A training backend of a user's own, in Megatron's manner: linear layers cut by columns or rows over a tensor group.

Parameters are plain tensors with Megatron's attributes (`tensor_model_parallel`, `partition_dim`); RLix knows nothing
of all this but what `TrainExecutor` asks for.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import linear

from rlix.engine.movers import Mover, SwapMover
from rlix.engine.train.adapters import Exported
from rlix.engine.train.executor import TrainExecutor
from rlix.engine.train.layout import Layout
from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.engine.weights.publication import tied_names
from rlix.nn import BaseTrainModule, ProcessGroups

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


class TensorParallelExecutor(TrainExecutor):
    @classmethod
    def arrange(cls, asked: Layout) -> Layout:
        if asked.shard > 1:
            raise ValueError(f"shard={asked.shard}: this backend cuts layers, use tensor_parallel_size")
        return asked

    def materialize(self, spec: ModuleSpec, groups: ProcessGroups) -> BaseTrainModule:
        self._groups = groups
        sizes = (self.layout.data, self.layout.tensor)
        self._mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("data", "tensor"))
        module = build_module(spec, torch.device("cpu"))
        for path, layer in list(module.named_modules()):
            if isinstance(layer, nn.Linear) and path.endswith((*COLUMNS, *ROWS)) and groups.tensor is not None:
                kind = ColumnParallelLinear if path.endswith(COLUMNS) else RowParallelLinear
                module.set_submodule(path, kind(layer, groups.tensor))
        module.to(self.device)
        if groups.data is not None:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(self._average)
        return module

    def part(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        dim = getattr(parameter, "partition_dim", None)
        if dim is None:
            return tensor
        return DTensor.from_local(tensor.detach(), self._mesh, (Replicate(), Shard(dim)), run_check=False)

    def exports(self, module: BaseTrainModule) -> list[Exported]:
        named = self.named(module)
        return [
            Exported(name, more, named[name], partial(named.__getitem__, name))
            for name, more in tied_names(named).items()
        ]

    def mover(self) -> Mover:
        return SwapMover(self.device)  # virtual devices are left as real ones are

    def _average(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=self._groups.data)
        parameter.grad.div_(self.layout.data)


class ColumnParallelLinear(nn.Module):
    """Each rank computes some of the outputs."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = _cut(whole.weight, 0, group)
        self.bias = None if whole.bias is None else _cut(whole.bias, 0, group)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(_Copy.apply(inputs, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Each rank has some of the inputs; the outputs are summed."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = _cut(whole.weight, 1, group)
        self.bias = whole.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _Sum.apply(linear(inputs, self.weight), self.group)
        return summed if self.bias is None else summed + self.bias


def _cut(whole: nn.Parameter, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    mine = whole.detach().chunk(group.size(), dim)[group.rank()].clone()
    part = nn.Parameter(mine, requires_grad=whole.requires_grad)
    part.tensor_model_parallel, part.partition_dim = True, dim
    return part


class _Copy(Function):
    """Every rank uses the inputs, so their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = outputs.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
