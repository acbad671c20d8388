"""The backend "fsdp2": PyTorch's fully sharded data parallelism, with copies of the shards if wanted (HSDP)."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlix.engine.train import sequence
from rlix.engine.train.executor import TrainExecutor
from rlix.engine.train.layout import Layout
from rlix.engine.train.materialize import ModuleSpec, build_module
from rlix.engine.weights.boxes import Cut, Piece, pieces_on_mesh
from rlix.nn import BaseTrainModule, ProcessGroups


class Fsdp2Executor(TrainExecutor):
    """Every rank computes on a part of the batch of its own, with weights that are gathered layer by layer."""

    computes_stretches = True

    @classmethod
    def arrange(cls, asked: Layout) -> Layout:
        """Layers are not cut here: ranks asked to be tensor-parallel share the shards of one copy instead."""
        if asked.tensor == 1:
            return asked
        if asked.shard > 1:
            raise ValueError(
                f"executor 'fsdp2' does not cut layers: tensor_parallel_size={asked.tensor} is read as "
                f"shard={asked.tensor}, and shard={asked.shard} was given too; give shard and data_parallel_size only"
            )
        return Layout(data=asked.data * asked.tensor, shard=asked.tensor, sequence=asked.sequence)

    def connect(self, spec: ModuleSpec, timeout_s: float) -> ProcessGroups:
        self._timeout_s = timeout_s
        if self.layout.world > 1:
            return super().connect(spec, timeout_s)
        if spec.computes_as_stored:
            return ProcessGroups()
        self.ctx.init_process_group(timeout_s=timeout_s)
        return ProcessGroups(dist.group.WORLD, dist.group.WORLD)

    def materialize(self, spec: ModuleSpec, groups: ProcessGroups) -> BaseTrainModule:
        if groups.world is None:
            return build_module(spec, self.device)
        mesh, width = self._mesh, self.layout.shard

        def held(shape: tuple[int, ...]) -> Sequence[Piece]:
            """What `fully_shard` leaves here: rows, in chunks of equal size, the last shorter."""
            return pieces_on_mesh(shape, (width,), (Cut(0),), (self.ctx.rank % width,), "")

        module = build_module(spec, self.device, lambda unit: shard(unit, mesh, spec), held)
        if groups.sequence is not None:
            sequence.spread(module, groups.sequence)
        return module

    def settle(self, module: BaseTrainModule) -> None:
        """Free parameters that a forward pass gathered and kept for a backward pass that never came."""
        for part in fsdp_modules(module):
            part.reshard()

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """(replicate, shard) over all ranks."""
        width, ranks = self.layout.shard, self.layout.world
        if width == ranks:
            return init_device_mesh(self.device.type, (ranks,), mesh_dim_names=("shard",))
        mesh = init_device_mesh(self.device.type, (ranks // width, width), mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():  # whose limit of time would be torch's own
            _set_pg_timeout(timedelta(seconds=self._timeout_s), group)
        return mesh


def fsdp_modules(module: nn.Module) -> Iterable[FSDPModule]:
    return (m for m in module.modules() if isinstance(m, FSDPModule))


def shard(unit: nn.Module, mesh: DeviceMesh, spec: ModuleSpec) -> None:
    """Cut a filled unit over a mesh, with the precision that `spec` asks for."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    compute: torch.dtype = getattr(torch, spec.compute_dtype) if spec.compute_dtype else dtype
    # Named only where it differs: FSDP would cast every block's inputs to the dtype they have.
    policy = MixedPrecisionPolicy(param_dtype=None if compute == dtype else compute, reduce_dtype=torch.float32)
    fully_shard(unit, mesh=mesh, mp_policy=policy)
