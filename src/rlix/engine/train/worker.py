"""One rank of a `TrainEngine`: owns a module, its shards and where their bytes are."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rlix.engine.residency import MoveReport, Residency, ResidentSet, module_tensors
from rlix.engine.train import checkpoint
from rlix.engine.train.adapters import aliases_of, exported
from rlix.engine.train.materialize import Checkpoint, ModuleSpec, build_module, fsdp_modules
from rlix.engine.train.saving import BackgroundSaver
from rlix.engine.weights import channel, publication, streams
from rlix.engine.weights.layout import Layout
from rlix.engine.weights.shards import Share, held, layout_of, sliced
from rlix.flow.worker import LOCK_TIMEOUT_S, Worker
from rlix.nn import TrainContext
from rlix.protocol.errors import StaleEpochError, WaitTimeoutError, WeightSyncError
from rlix.protocol.messages import DeviceKind, Fence

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0  # for a save that is still being written


@dataclass(frozen=True, slots=True)
class TrainStatus:
    """Bytes are this rank's own; `data_part` is the one of a split batch that it computes on, from 0."""

    rank: int
    data_part: int
    residency: Residency
    device_bytes: int
    host_bytes: int
    epoch: int | None
    parameters: int


class TrainWorker(Worker):
    """The executor "fsdp2". Another one has the same public methods, and nothing above it changes.

    Methods run one at a time, in the order they were called: ranks must meet in the same collectives.
    """

    def __init__(self) -> None:
        self._saver: BackgroundSaver | None = None

    def setup(
        self, spec: ModuleSpec, shards: int, collective_timeout_s: float, lease: Fence | None = None
    ) -> TrainStatus:
        """Join the process group, build the module, fill and shard it, under `lease` if there is one.

        `shards` is the number of ranks that hold one replica between them; a rank waits in a collective for at most
        `collective_timeout_s`.
        """
        self._lease = lease
        self._ended = 0  # the newest epoch that was released
        self._locks = self.ctx.device_locks()
        self._locks.acquire(self.ctx.fence(lease), LOCK_TIMEOUT_S)
        cuda = self.ctx.kind is DeviceKind.CUDA
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        mesh = self._mesh(spec, shards, collective_timeout_s)
        module = build_module(spec, device, mesh)
        world = self.ctx.world_size
        module.context = TrainContext(self.ctx.rank, world, *self._data_part(shards), device)
        torch.manual_seed(spec.seed + self.ctx.rank)
        self._module = module
        self._weights_path, self._seed = spec.weights_path, spec.seed
        self._collective_timeout_s = collective_timeout_s
        self._resident = ResidentSet(
            f"rank {self.ctx.rank} of {self.ctx.group}",
            lambda: module_tensors(module, *checkpoint.optimizers(module).values()),
            device,
        )
        module.on_weights_materialized()
        return self.status()

    def _data_part(self, shards: int) -> tuple[int, int]:
        """Which part of a split batch this rank computes on, and of how many: with FSDP every rank has its own."""
        return self.ctx.rank, self.ctx.world_size

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], epoch: int | None, only_first: bool
    ) -> Any:
        """Run a method of the module; the result's tensors come back whole, detached and on the host.

        With `only_first` the results of other ranks than 0 are not wanted.
        """
        self._guard(epoch)
        try:
            result = getattr(self._module, method)(*args, **kwargs)
            if isinstance(result, Iterator):
                result = list(result)
            result = None if result is self._module else _to_host(result)
            return None if only_first and self.ctx.rank else result
        finally:
            self._reshard()

    def publish(self, version: int, bucket_bytes: int, share: Share, epoch: int | None) -> publication.PublishedWeights:
        """Store this rank's share of the weights."""
        self._guard(epoch)
        weights = exported(self._module)
        mine = sliced(weights, share)
        return publication.publish(mine, version, bucket_bytes=bucket_bytes, aliases=aliases_of(weights))

    def weight_layout(self) -> tuple[Layout, dict[str, tuple[str, ...]]]:
        """What this rank holds of the exported weights, and the further names of tied ones."""
        weights = exported(self._module)
        self._offered = [weight.name for weight in weights]
        return layout_of(weights), aliases_of(weights)

    def join_channel(self, ticket: channel.Ticket) -> None:
        channel.join(ticket, self._module.device)

    def leave_channel(self, name: str) -> None:
        channel.leave(name)

    def send_weights(self, delivery: channel.Delivery, epoch: int | None) -> int:
        """Hand this rank's shards to those who need them; returns the bytes written."""
        delivery = delivery.sent_by(self.ctx.rank)
        with channel.answering(delivery):
            self._guard(epoch)
            weights = exported(self._module)
            if [weight.name for weight in weights] != self._offered:
                raise WeightSyncError("the module has other weights than when the channel was opened: sync again")
        return streams.send(delivery, ((weight.name, partial(held, weight)) for weight in weights))

    # ---- residency and fencing ---------------------------------------------------------------------------------

    def acquire(self, lease: Fence | int) -> MoveReport:
        """Bring the bytes on the device under a lease. One that the engine has released is over for it."""
        fence = self.ctx.fence(lease)
        if fence.epoch <= self._ended:
            raise StaleEpochError(f"{self.ctx.group}: acquire under epoch {fence.epoch} refused: it has ended")
        report = self._bring(fence)
        self._lease = fence
        return report

    def release(self, epoch: int) -> MoveReport:
        """Free the device memory and end the epoch: nothing is accepted under it any more."""
        if self._lease is not None and epoch < self._lease.epoch:
            raise StaleEpochError(
                f"{self.ctx.group}: release of epoch {epoch} refused: epoch {self._lease.epoch} holds it now"
            )
        report = self.to_host()
        self._ended = max(self._ended, epoch)
        self._lease = None
        return report

    def to_device(self) -> MoveReport:
        return self._bring(self.ctx.fence(self._lease))

    def _bring(self, fence: Fence) -> MoveReport:
        if self._resident.state is not Residency.META:  # which has no bytes to bring
            self._locks.acquire(fence, LOCK_TIMEOUT_S)
        return self._resident.to_device()

    def to_host(self) -> MoveReport:
        self._reshard()
        report = self._resident.to_host()
        self._locks.release()
        return report

    def to_meta(self) -> MoveReport:
        """Drop weights, gradients and optimizer state; `load_state`, or `load`, brings the engine back."""
        self._reshard()
        report = self._resident.to_meta()
        self._locks.release()
        return report

    def status(self) -> TrainStatus:
        return TrainStatus(
            rank=self.ctx.rank,
            data_part=self._module.dp_rank,
            residency=self._resident.state,
            device_bytes=self._resident.device_bytes,
            host_bytes=self._resident.host_bytes,
            epoch=self._epoch(),
            parameters=sum(p.numel() for p in self._module.parameters()),
        )

    def ping(self) -> int:
        """Answers once every earlier call has ended."""
        return self.ctx.rank

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(self, folder: str, epoch: int | None) -> None:
        with self._reading(epoch):
            checkpoint.save_weights(self._module, Path(folder), self._weights_path)

    def save_state(self, folder: str, epoch: int | None) -> None:
        with self._reading(epoch):
            self._background().drain(self._collective_timeout_s)
            checkpoint.save_state(self._module, Path(folder))

    @contextmanager
    def _reading(self, epoch: int | None) -> Iterator[None]:
        """What waits in host memory needs no lease to be read."""
        if self._resident.state is not Residency.HOST:
            self._guard(epoch)
        with self._resident.readable():
            yield

    def start_save(self, folder: str, epoch: int | None) -> int:
        """Begin to save in the background; the number is what `save_result` is asked by."""
        self._guard(epoch)
        return self._background().start(self._module, Path(folder))

    def save_result(self, number: int) -> tuple[bool, str | None]:
        return self._background().result(number)

    def _background(self) -> BackgroundSaver:
        if self._saver is None:
            self._saver = BackgroundSaver(self._collective_timeout_s)
        return self._saver

    def load(self, folder: str, epoch: int | None) -> None:
        source = Checkpoint.in_folder(Path(folder), self._module)
        with self._filling(epoch):
            source.refill(self._seed)

    def load_state_dict(self, published: publication.PublishedWeights, epoch: int | None) -> None:
        given = {name: tensor for entry, tensor in publication.stream(published) for name in entry.names}
        source = Checkpoint.of_tensors(given, self._module)
        with self._filling(epoch):
            source.refill(self._seed)

    def load_state(self, folder: str, epoch: int | None) -> None:
        with self._filling(epoch):
            checkpoint.load_state(self._module, Path(folder))

    @contextmanager
    def _filling(self, epoch: int | None) -> Iterator[None]:
        """After `to_meta`: room to load into, with nothing in optimizers; when loading fails, there is none again."""
        empty = self._resident.state is Residency.META
        if empty:
            self._locks.acquire(self.ctx.fence(self._lease), LOCK_TIMEOUT_S)
            self._resident.allocate()
            self._module.zero_grad(set_to_none=True)
            for optimizer in checkpoint.optimizers(self._module).values():
                optimizer.state.clear()
        try:
            self._guard(epoch)
            yield
        except BaseException:  # re-raised
            if empty:
                self.to_meta()
            raise

    def close(self) -> None:
        try:
            if self._saver is not None:
                self._saver.drain(_CLOSE_TIMEOUT_S)
        except WaitTimeoutError:
            logger.warning("rank %d of %s: closed while a save was being written", self.ctx.rank, self.ctx.group)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _guard(self, epoch: int | None) -> None:
        """Refuse work under another epoch than the one that holds the engine, and work without bytes."""
        mine = self._epoch()
        if epoch != mine:
            raise StaleEpochError(
                f"{self.ctx.group}: a call under epoch {epoch} refused: "
                + ("no epoch holds the engine" if mine is None else f"epoch {mine} holds it now")
            )
        self._resident.check()

    def _epoch(self) -> int | None:
        return None if self._lease is None else self._lease.epoch

    def _reshard(self) -> None:
        """Free parameters that a forward pass gathered and kept for a backward pass that never came."""
        for module in fsdp_modules(self._module):
            module.reshard()

    def _mesh(self, spec: ModuleSpec, shards: int, timeout_s: float) -> DeviceMesh | None:
        """(replicate, shard) over all ranks; None for one rank in one precision, which needs no wrapping."""
        world = self.ctx.world_size
        if world == 1 and spec.compute_dtype in (None, spec.dtype):
            return None
        self.ctx.init_process_group(timeout_s=timeout_s)
        kind = "cuda" if self.ctx.kind is DeviceKind.CUDA else "cpu"
        if shards == world:
            return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
        return init_device_mesh(kind, (world // shards, shards), mesh_dim_names=("replicate", "shard"))


def _to_host(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        whole = result.full_tensor() if isinstance(result, DTensor) else result
        return whole.detach().cpu()
    if isinstance(result, dict):
        return {key: _to_host(value) for key, value in result.items()}
    if type(result) in (list, tuple):
        return type(result)(_to_host(value) for value in result)
    return result
