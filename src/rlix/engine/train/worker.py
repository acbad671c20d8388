"""One rank of a `TrainEngine`: owns a module, its shards and where their bytes are."""

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlix.engine.life_cycle import Life, Residency
from rlix.engine.movers import mover_for
from rlix.engine.parallel import like
from rlix.engine.residency import MoveReport, ResidentSet
from rlix.engine.train import checkpoint
from rlix.engine.train.adapters import Exported, aliases_of, answers_plainly, to_publish
from rlix.engine.train.evacuation import Begun, standing
from rlix.engine.train.executor import TrainExecutor
from rlix.engine.train.handover import Handover, pack, unpack
from rlix.engine.train.last_call import LastCall
from rlix.engine.train.layout import Layout
from rlix.engine.train.materialize import Checkpoint, ModuleSpec
from rlix.engine.train.optimizers import optimizers
from rlix.engine.train.random_state import set_random_state
from rlix.engine.train.saving import BackgroundSaver
from rlix.engine.weights import known_answer, publication
from rlix.engine.weights.buckets import dtype_name
from rlix.engine.weights.known_answer import KnownAnswer
from rlix.engine.weights.shards import HeldRow, Share, held_rows, sliced
from rlix.nn import ProcessGroups, TrainContext
from rlix.protocol.errors import RlixError, StaleEpochError, WaitTimeoutError
from rlix.protocol.messages import DeviceKind, Fence
from rlix.workers.worker import CONTROL, LOCK_TIMEOUT_S, Worker

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0  # for a save that is still being written
_LEAVES_BYTES = frozenset(  # as they are, or says otherwise
    {
        "call",
        "read",
        "publish",
        "held_weights",
        "save",
        "save_state",
        "start_save",
    }
)


@dataclass(frozen=True, slots=True)
class TrainStatus:
    """Bytes are this rank's own; `data_part` is the one of a split batch that it computes on, from 0."""

    rank: int
    data_part: int
    residency: Residency
    life: Life
    device_bytes: int
    host_bytes: int
    epoch: int | None
    parameters: int


class TrainWorker(Worker):
    """Holds an executor's module, its device's lock and the place where its bytes are.

    Methods run one at a time, in the order they were called: ranks must meet in the same collectives.
    """

    def __init__(self) -> None:
        self._saver: BackgroundSaver | None = None
        self._calls = 0
        self._groups: ProcessGroups | None = None  # once it has joined them

    def enter(self, lease: Fence | int | None = None, ended: int = 0) -> None:
        """Take the device's lock, under `lease` if there is one. Those up to the epoch `ended` are over for the engine.

        Raises what `DeviceLocks.acquire` raises.
        """
        self._lease = None if lease is None else self.ctx.fence(lease)
        self._entered = Life(ended=ended).enter(self._epoch() or 0)
        self._locks = self.ctx.device_locks()
        self._locks.acquire(self.ctx.fence(lease), LOCK_TIMEOUT_S)

    def leave(self) -> None:
        """After `enter`, and nothing since: let go of the lock, if it was had."""
        self._locks.release()

    def setup(
        self,
        executor: type[TrainExecutor],
        layout: Layout,
        spec: ModuleSpec,
        collective_timeout_s: float,
    ) -> TrainStatus:
        """After `enter`: join the process group, build the module, fill and cut it.

        After `park` it is all done again but for the first. A rank waits in a collective for at most
        `collective_timeout_s`.
        """
        cuda = self.ctx.kind is DeviceKind.CUDA
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        if self._groups is None:
            if cuda:
                torch.cuda.set_device(device)
            self._executor = executor(self.ctx, layout, device)
            self._groups = self._executor.connect(spec, collective_timeout_s)
        module, self._calls = self._executor.materialize(spec, self._groups), 0
        world = self.ctx.world_size
        module.context = TrainContext(self.ctx.rank, world, *self._executor.data_part(), device, self._groups)
        torch.manual_seed(spec.seed + self.ctx.rank)
        self._module, self._last = module, LastCall(module)
        self._weights_path, self._seed = spec.weights_path, spec.seed
        self._collective_timeout_s = collective_timeout_s
        self._computes_in = spec.compute_dtype or spec.dtype
        self._resident = ResidentSet(
            f"rank {self.ctx.rank} of {self.ctx.group}",
            lambda: self._executor.resident(module),
            device,
            mover=self._executor.mover() or mover_for(device),
        )
        self._resident.life = replace(self._resident.life, epoch=self._entered.epoch, ended=self._entered.ended)
        module.on_weights_materialized()
        return self.status()

    def park(self) -> None:
        """Drop the module. The process stays, in its groups and with what it has published, to be set up again."""
        self.to_meta()
        del self._module, self._last, self._resident

    def do(self, number: int, first: int, method: str, *args: Any) -> Any:
        """Run a method of this class as the `number`th call of the engine, which all ranks must get alike.

        `first`: of those that are under way.
        """
        self._calls += 1
        if number != self._calls:
            raise RlixError(
                f"{self.ctx.group}: rank {self.ctx.rank} got call {number} ({method}) after {self._calls - 1} calls: "
                "its collectives would meet those of another call"
            )
        with self._last.runs(number, first, leaves_bytes=method in _LEAVES_BYTES):
            return getattr(self, method)(*args)

    def skip(self, number: int) -> None:
        """What the `number`th call sends could not be sent to every rank: the next one follows all the same."""
        self._calls = number

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], epoch: int | None, only_first: bool
    ) -> Any:
        """Run a method of the module; the result's tensors come back whole, detached and on the host.

        With `only_first` the results of other ranks than 0 are not wanted.
        """
        self._guard(epoch)
        try:
            result = self._executor.run(self._module, method, args, kwargs)
            if isinstance(result, Iterator):
                result = list(result)
            result = None if result is self._module else _to_host(result)
            return None if only_first and self.ctx.rank else result
        except SystemExit as error:  # it would end this process, and with it weights and optimizer state
            raise RuntimeError(f"{method}() was left by SystemExit({error.code!r})") from error
        finally:
            self._executor.settle(self._module)

    def read(self, method: str, args: tuple[Any, ...], epoch: int | None) -> Any:
        """Run a method of the module that reads, wherever its bytes are; the result of rank 0."""
        with self._reading(epoch):
            result = getattr(self._module, method)(*args)
            return None if self.ctx.rank else result

    def publish(
        self, version: int, bucket_bytes: int, share: Share, epoch: int | None, as_trained: bool, ask: bool
    ) -> publication.PublishedWeights:
        """Store this rank's share of the weights. `ask`: with what they answer, which other weights would not."""
        with self._reading(epoch):
            weights = self._exports(as_trained=as_trained)
            mine = sliced(weights, share)
            stored = publication.publish(mine, version, bucket_bytes=bucket_bytes, aliases=aliases_of(weights))
        answers = ask and self._resident.state is Residency.DEVICE
        return replace(stored, known=self._known_answer()) if answers else stored

    def _known_answer(self) -> KnownAnswer | None:
        """What the weights answer; None from a module of which only itself knows how it is asked."""
        module: Any = self._module
        if not answers_plainly(module):
            return None
        modes = {part: part.training for part in module.modules()}
        module.eval()
        try:
            with torch.no_grad():
                ids = torch.tensor([known_answer.tokens(module.config.vocab_size)], device=module.device)
                logits = self._executor.run(module, "forward", (), {"input_ids": ids, "use_cache": False}).logits
                found = logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        finally:
            for part, training in modes.items():
                part.training = training
            self._executor.settle(module)
        coarsest = min(
            (self._computes_in, dtype_name(module.publish_dtype or torch.float32)), key=known_answer.fineness
        )
        return KnownAnswer(tuple(ids[0].tolist()), tuple(found), coarsest, self.ctx.group)

    def held_weights(self, as_trained: bool) -> list[HeldRow]:
        """What this rank holds of the exported weights."""
        return held_rows(self._exports(as_trained=as_trained))

    def _exports(self, *, as_trained: bool) -> list[Exported]:
        weights = self._executor.exports(self._module)
        return weights if as_trained else to_publish(self._module, weights)

    # ---- residency and fencing ---------------------------------------------------------------------------------

    def acquire(self, lease: Fence | int) -> MoveReport:
        """Bring the bytes on the device under a lease. One that the engine has released is over for it."""
        fence = self.ctx.fence(lease)
        entered = self._resident.life.enter(fence.epoch)
        report = self._bring(fence)
        self._resident.life = replace(self._resident.life, epoch=entered.epoch)
        self._lease = fence
        return report

    def release(self, epoch: int) -> MoveReport:
        """Free the device memory and end the epoch: nothing is accepted under it any more."""
        ended = self._resident.life.drain(epoch).ended
        report = self.to_host()
        self._resident.life = replace(self._resident.life, ended=ended)
        self._lease = None
        return report

    def to_device(self) -> MoveReport:
        return self._bring(self.ctx.fence(self._lease))

    def _bring(self, fence: Fence) -> MoveReport:
        if self._resident.state is not Residency.META:  # which has no bytes to bring
            self._locks.acquire(fence, LOCK_TIMEOUT_S)
        try:
            return self._resident.to_device()
        finally:
            if self._resident.state is not Residency.DEVICE:  # there is no room, and what came has gone again
                self._locks.release()

    def to_host(self) -> MoveReport:
        self._executor.settle(self._module)
        report = self._resident.to_host()
        self._locks.release()
        return report

    def to_meta(self) -> MoveReport:
        """Drop weights, gradients and optimizer state; `load_state`, or `load`, brings the engine back."""
        self._executor.settle(self._module)
        report = self._resident.to_meta()
        self._locks.release()
        return report

    def status(self) -> TrainStatus:
        return TrainStatus(
            rank=self.ctx.rank,
            data_part=self._module.dp_rank,
            residency=self._resident.state,
            life=self._resident.life,
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
            checkpoint.save_weights(self._module, Path(folder), self._weights_path, self._executor)

    def save_state(self, folder: str, epoch: int | None) -> None:
        with self._reading(epoch):
            self._background().drain(self._collective_timeout_s)
            checkpoint.save_state(self._module, Path(folder), self._executor)

    @contextmanager
    def _reading(self, epoch: int | None) -> Iterator[None]:
        """What waits in host memory needs no lease to be read."""
        if self._resident.state is not Residency.HOST:
            self._guard(epoch)
        with self._resident.readable():
            yield

    def start_save(self, folder: str, epoch: int | None) -> int:
        """Begin to save in the background; the number is what `save_result` is asked by."""
        with self._reading(epoch):
            return self._background().start(self._module, Path(folder), self._executor)

    def save_result(self, number: int) -> tuple[bool, str | None]:
        return self._background().result(number)

    def _background(self) -> BackgroundSaver:
        if self._saver is None:
            self._saver = BackgroundSaver(self._collective_timeout_s)
        return self._saver

    def load(self, folder: str, epoch: int | None) -> None:
        source = Checkpoint.in_folder(Path(folder), self._module, self._executor.named(self._module))
        with self._filling(epoch):
            source.refill(self._seed)

    def load_state_dict(self, published: publication.PublishedWeights, epoch: int | None) -> None:
        given = {name: tensor for entry, tensor in publication.stream(published) for name in entry.names}
        source = Checkpoint.of_tensors(given, self._module, self._executor.named(self._module))
        with self._filling(epoch):
            source.refill(self._seed)

    def load_state(self, folder: str, epoch: int | None) -> None:
        with self._filling(epoch):
            checkpoint.load_state(self._module, Path(folder), self._executor)

    # ---- to other ranks ----------------------------------------------------------------------------------------

    def hand_over(self, undo: int | None = None, lost: Collection[int] = ()) -> Handover | None:
        """This rank's part of the training state, wherever its bytes are; asks nothing of the other ranks.

        `undo`: where this call, and those after it, have changed no weights, random generators are as it found them.
        `lost`: ranks whose parts others hand over that hold copies of them.

        Raises RlixError beside a move, or a forward pass, which has gathered what is not handed over.
        """
        if self._resident.state is Residency.META:
            return None
        self._executor.settle(self._module)
        with self._resident.readable():
            snapshot = checkpoint.capture(self._module, copy=False, parts=self._executor)
            if not self._last.leaves_shards:
                raise RlixError("a move or a forward pass is not through")
            buckets, manifest = pack(snapshot.tensors, self.ctx.rank, lost)
        random = snapshot.random_state if undo is None else json.dumps(self._last.random_state(undo))
        return Handover(buckets, manifest, snapshot.shared, random)

    def changes(self, since: int) -> int:
        """How often this rank has changed weights or optimizers in the call `since`, and those after it."""
        return self._last.changes(since)

    def take_over(self, given: Sequence[Any]) -> TrainStatus:
        """Take the state that other ranks handed over, given as Ray's references by rank; None of one that was lost.

        A rank that takes nobody's place, or a lost one's, begins a random stream of its own.
        """
        timeout_s, rank = self._collective_timeout_s, self.ctx.rank
        handed: dict[int, Handover] = {i: of.future().result(timeout_s) for i, of in enumerate(given) if of is not None}
        parts = list(handed.values())
        read = partial(unpack, given=parts)
        what = f"the state of {self.ctx.group}"
        checkpoint.restore(self._module, what, json.loads(parts[0].shared), read, self._executor)
        set_random_state(json.loads(handed.get(rank, parts[-1]).random_state))
        if rank not in handed:  # drawn: of seeds that are added up, some are another rank's
            torch.manual_seed(int(torch.randint(2**62, ())) + rank)
        return self.status()

    def collectives(self) -> tuple[Begun, bool]:
        """How many collectives this rank has begun, and whether its device is through."""
        return standing(self.ctx.kind)

    @ray.method(concurrency_group=CONTROL)
    def abort(self) -> None:
        """End collectives on a GPU that wait for a rank that will not come; called while another method runs.

        Collectives over gloo end by themselves when the process of one of their ranks does.
        """
        if self.ctx.kind is DeviceKind.CUDA and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    @contextmanager
    def _filling(self, epoch: int | None) -> Iterator[None]:
        """After `to_meta`: room to load into, with nothing in optimizers; when loading fails, there is none again."""
        empty = self._resident.state is Residency.META
        if empty:
            self._locks.acquire(self.ctx.fence(self._lease), LOCK_TIMEOUT_S)
        try:
            with self._resident.filling() if empty else nullcontext():
                if empty:
                    self._module.zero_grad(set_to_none=True)
                    for optimizer in optimizers(self._module).values():
                        optimizer.state.clear()
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


def _to_host(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        whole = result.full_tensor() if isinstance(result, DTensor) else result
        return whole.detach().cpu()
    if isinstance(result, dict):
        host = {key: _to_host(value) for key, value in result.items()}
        return like(result, host)
    if type(result) in (list, tuple):
        return type(result)(_to_host(value) for value in result)
    return result
