"""`TrainEngine`: a training module spread over devices, used as if it were one object in this process."""

import difflib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any, Literal, Self, overload

import torch

from rlix.engine import placement
from rlix.engine.base import Engine, merged, plainly
from rlix.engine.parallel import combine, scatter
from rlix.engine.residency import MoveReport, Residency
from rlix.engine.train.checkpoint import STATE_FILE
from rlix.engine.train.materialize import ModuleSpec, module_description, safetensors_index
from rlix.engine.train.saving import SaveHandle
from rlix.engine.train.worker import TrainStatus, TrainWorker
from rlix.engine.weights.buckets import DEFAULT_BUCKET_BYTES
from rlix.engine.weights.publication import PublishedWeights, publish, stream, tied_names
from rlix.engine.weights.sync import Channels, Trainer, Transport, WeightReceiver, WeightSyncReport, choose
from rlix.flow.worker_group import PerRank, WorkerGroup
from rlix.nn import BaseTrainModule, reduction_of
from rlix.protocol.errors import NotResidentError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, Fence

logger = logging.getLogger(__name__)

EXECUTORS: dict[str, type[TrainWorker]] = {"fsdp2": TrainWorker}
SETTLE_TIMEOUT_S = 15.0
"""After one rank failed: how long the others may take to end the same call before the engine is given up."""


class TrainEngine(Engine):
    """A handle on a module that trains on one or more devices.

    Args:
        module: an instance built under `torch.device("meta")` (its class and arguments are what counts), or a pair of
            module class and its configuration: a dict of keyword arguments, or one positional argument.
        executor: how it is spread; "fsdp2".
        name: of the workers, in logs and errors.

    After `build`, every public method of the module can be called on the engine. It runs on all ranks; arguments
    wrapped in `NeedParallel` are split over them. With FSDP all ranks, also those that share a replica's shards,
    compute on data of their own, so a batch is split over `data_parallel_size * tensor_parallel_size` ranks.
    """

    def __init__(
        self,
        module: BaseTrainModule | tuple[type[BaseTrainModule], Any],
        executor: str = "fsdp2",
        *,
        name: str = "train",
    ) -> None:
        super().__init__(name)
        if executor not in EXECUTORS:
            raise ValueError(f"unknown executor {executor!r} for TrainEngine; known: {', '.join(EXECUTORS)}")
        self.executor = executor
        self._class, self._args, self._kwargs = module_description(module)
        self._data_parts: list[int] = []  # of each rank: which part of a split batch it computes on
        self.version = 0
        self._epoch: int | None = None
        self._channels: Channels | None = None

    def build(
        self,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        sequence_parallel_size: int = 1,
        devices: Sequence[Device] | None = None,
        colocate_with: placement.Placed | Sequence[placement.Placed] | None = None,
        not_colocate_with: placement.Placed | Sequence[placement.Placed] | None = None,
        acceptable_node_ips: Sequence[str] | None = None,
        weights_path: str | Path | None = None,
        seed: int = 0,
        lease: Fence | None = None,
        dtype: str | torch.dtype = "float32",
        compute_dtype: str | torch.dtype | None = None,
        namespace: str | None = None,
        start: Literal["fork", "spawn"] = "fork",
        build_timeout_s: float = 300.0,
        call_timeout_s: float = 3600.0,
        collective_timeout_s: float = 600.0,
    ) -> Self:
        """Start the workers and fill the module. On failure nothing is left behind.

        Args:
            tensor_parallel_size: ranks that hold one replica between them (FSDP2 shards).
            data_parallel_size: replicas; default: as many as `devices` allow, else 1.
            sequence_parallel_size: only 1; see the error for what to use instead.
            devices: one per rank, in rank order; default: chosen from the pool, preferring free ones.
            weights_path: a local Hugging Face folder of safetensors; default: a random init from `seed`, the same
                on every layout.
            lease: under which the devices are used, as if `acquire`d at once; default: this program's own.
            dtype: of parameters and optimizer state; `compute_dtype` (e.g. "bfloat16") of forward and backward.
            call_timeout_s: longest any method may take; `collective_timeout_s`: longest a rank waits for the others.

        Raises:
            ValueError: sizes and devices do not agree, no devices fit, or sequence parallelism was asked for.
            FileNotFoundError: no weights at `weights_path`.
            DeviceBusyError: somebody else has bytes on a device; names the process and its job.
            WorkerError, WaitTimeoutError: a worker failed to start, or did not in time.
        """
        if sequence_parallel_size != 1:
            raise ValueError(
                f"sequence_parallel_size={sequence_parallel_size}: executor {self.executor!r} does not split "
                "sequences; for long ones use more shards (tensor_parallel_size), smaller micro-batches, "
                "compute_dtype='bfloat16' and module.gradient_checkpointing_enable()"
            )
        if weights_path is not None:
            safetensors_index(Path(weights_path))
        self.devices = self._choose_devices(
            tensor_parallel_size,
            data_parallel_size,
            devices,
            colocate_with=colocate_with,
            not_colocate_with=not_colocate_with,
            acceptable_node_ips=acceptable_node_ips,
        )
        spec = ModuleSpec(
            module_class=self._class,
            args=self._args,
            kwargs=self._kwargs,
            seed=seed,
            weights_path=None if weights_path is None else str(Path(weights_path).resolve()),
            dtype=_dtype_name(dtype),
            compute_dtype=None if compute_dtype is None else _dtype_name(compute_dtype),
        )
        self._timeout_s = call_timeout_s
        self._group = WorkerGroup(
            EXECUTORS[self.executor],
            name=self.name,
            placements=[(device,) for device in self.devices],
            namespace=namespace,
            start=start,
            max_concurrency=1,
            start_timeout_s=build_timeout_s,
        )
        try:
            settings = (spec, tensor_parallel_size, collective_timeout_s, lease)
            ranks = self._run("setup", *settings, timeout_s=build_timeout_s)
        except BaseException:  # re-raised; whatever it is, Ctrl-C too, no worker is left behind
            self.close()
            raise
        self._data_parts = [status.data_part for status in ranks]
        self._trainer = Trainer(self.name, self.devices, partial(self._run, timeout_s=call_timeout_s))
        self._channels = Channels(self._trainer)
        placement.occupy(self, self.devices)
        self._residency = Residency.DEVICE
        self._epoch = None if lease is None else lease.epoch
        return self

    # ---- methods of the module ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or "_class" not in self.__dict__:
            raise AttributeError(name)
        method = getattr(self._class, name, None)
        if not callable(method):
            public = [n for n in dir(self._class) if not n.startswith("_") and callable(getattr(self._class, n, None))]
            near = difflib.get_close_matches(name, [*public, *_public(type(self))], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; {self._class.__name__} defines: {_own(self._class)}"
            raise AttributeError(f"neither TrainEngine nor {self._class.__name__} has a method {name!r}{hint}")  # noqa: TRY004
        return partial(self._call_module, name)

    def _call_module(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        self._check_resident()
        parts = self._data_parts
        scattered = scatter(args, kwargs, max(parts) + 1)
        chosen = reduction_of(getattr(self._class, name)) or ("first" if scattered.sizes is None else "gather")
        mine = (PerRank([scattered.args[part] for part in parts]), PerRank([scattered.kwargs[part] for part in parts]))
        of_ranks = self._run("call", name, *mine, self._epoch, chosen == "first", timeout_s=self._timeout_s)
        results = [of_ranks[parts.index(part)] for part in range(max(parts) + 1)]
        return combine(results, chosen, scattered.sizes, scattered.length)

    # ---- residency ---------------------------------------------------------------------------------------------

    def acquire(self, lease: Fence | int) -> MoveReport:
        """Bring the bytes on the devices under a lease, given by its fence or its epoch; later calls run under it.

        Raises:
            StaleEpochError: the lease has ended for this engine, or a device has been used under a later one.
            DeviceBusyError: somebody else has bytes on a device; names the process and its job.
        """
        report = self._move("acquire", Residency.DEVICE, lease)
        self._epoch = lease.epoch if isinstance(lease, Fence) else lease
        return report

    def release(self, epoch: int) -> MoveReport:
        """Free the devices' memory (bytes go to the host) and end the epoch."""
        report = self._move("release", Residency.HOST, epoch)
        self._epoch = None
        return report

    def cuda(self, what: str | None = None) -> MoveReport:
        """Bring weights, gradients and optimizer state on the devices (virtual ones too)."""
        if what not in (None, "weights"):
            raise ValueError(f"a TrainEngine has no {what!r} to move; it moves as a whole: engine.cuda()")
        return self._move("to_device", Residency.DEVICE)

    def cpu(self) -> MoveReport:
        """Free the devices' memory; the bytes wait in host memory."""
        return self._move("to_host", Residency.HOST)

    def meta(self) -> MoveReport:
        """Drop every byte; only `load_state`, `load` or `load_state_dict` brings the engine back."""
        return self._move("to_meta", Residency.META)

    def status(self) -> tuple[TrainStatus, ...]:
        """Of every rank."""
        return tuple(self._run("status", timeout_s=self._timeout_s))

    def _move(self, method: str, state: Residency, *args: Fence | int) -> MoveReport:
        reports: list[MoveReport] = self._run(method, *args, timeout_s=self._timeout_s)
        self._residency = state
        return merged(reports)

    # ---- weights and checkpoints -------------------------------------------------------------------------------

    def publish(self, version: int | None = None, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> PublishedWeights:
        """Store the current weights as a version (default: the last one plus 1) for inference engines to pull.

        The buckets live in Ray's object store as long as somebody holds the result and the workers live.
        """
        self._check_resident()
        version = self.version + 1 if version is None else version
        published = self._trainer.publish(version, bucket_bytes, self._epoch)
        self.version = version
        return published

    def p2p_weight_sync(
        self,
        inference_engine: WeightReceiver,
        *,
        names: Collection[str] | None = None,
        transport: Transport = "auto",
        timeout_s: float = 120.0,
    ) -> WeightSyncReport:
        """Put the current weights, as a new version, into an inference engine, in place.

        Args:
            names: the tensors that have changed since the last sync to this engine, as `state_dict` names them; the
                others stay as they are there. Default: all. Not through host memory.
            transport: "host": buckets in Ray's object store, as `publish` makes them; "direct": each worker there gets
                what it needs from a rank here that holds it, in its dtype, through memory that they share (on a node,
                or by CUDA IPC on a GPU), else in messages (gloo, or NCCL between GPUs); "p2p": the same in messages
                only; "auto": "direct" on virtual GPUs, "host" on GPUs.
            timeout_s: of "direct" and "p2p": longest that one side waits for the other, bucket by bucket.

        Raises:
            ValueError: the transport cannot reach all replicas, or does not do `names`; says why.
            WeightSyncError: names, shapes or dtypes do not fit, all of which are listed; nothing was changed.
            NotResidentError: weights are not on the devices, here or there.
            WaitTimeoutError, TransferError, WorkerError: one side did not answer, or broke off. Replicas that took
                part may hold undefined weights: they refuse to generate until they are loaded again (`cuda`).
        """
        self._check_resident()
        start = time.perf_counter()
        way = choose(transport, self.devices, inference_engine.receivers)
        if way is None and names is not None:
            raise ValueError('names=... is for transport "direct" or "p2p": through host memory all tensors move')
        try:
            if way is None:
                published = self.publish()
                inference_engine.update_weights(published)
                nbytes = published.manifest.nbytes * len(inference_engine.receivers)
                return WeightSyncReport(
                    published.version, published.manifest, ("host",), nbytes, time.perf_counter() - start
                )
            assert self._channels is not None
            self.version += 1  # also when it fails: no two attempts have the same
            channel, nbytes = self._channels.transfer(
                inference_engine,
                self.version,
                way=way,
                transport=transport,
                only=names,
                timeout_s=timeout_s,
                epoch=self._epoch,
            )
        except WorkerError as error:
            raise plainly(error) from error.__cause__
        return WeightSyncReport(self.version, channel.manifest, channel.ways, nbytes, time.perf_counter() - start)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole weights in host memory, as `save` writes them; tied ones under each of their names."""
        self._check_resident()
        published = self._trainer.publish(self.version, DEFAULT_BUCKET_BYTES, self._epoch)
        copies = ((entry.names, tensor.clone()) for entry, tensor in stream(published))
        return {name: tensor for names, tensor in copies for name in names}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take whole weights, and nothing else, by the names that `state_dict` gives them, on any number of ranks.

        Of tied weights one name is enough. As with `load`: names go through the module's `import_name`, adapters
        begin as nothing, and optimizers keep their state, except after `meta()`. The bytes pass through Ray's object
        store, which must have room for all of them.

        Raises:
            WeightSyncError: lists every missing, unknown and mis-shaped name; nothing was changed.
            NotResidentError: the engine's bytes wait in host memory: bring them back with `cuda()` first.
        """
        self._workers()
        if self._residency is Residency.HOST:
            self._check_resident()
        first = tied_names(dict(state))
        given = publish(((name, state[name]) for name in first), self.version, aliases=first)
        self._run("load_state_dict", given, self._epoch, timeout_s=self._timeout_s)
        self._residency = Residency.DEVICE

    def save(self, folder: str | Path) -> None:
        """Write safetensors, config and tokenizer (where known): loads in plain transformers.

        The weights may be on the devices or wait in host memory.
        """
        if self._residency is not Residency.HOST:
            self._check_resident()
        self._run("save", _absolute(folder), self._epoch, timeout_s=self._timeout_s)

    def load(self, folder: str | Path) -> None:
        """Take weights, and nothing else, from a Hugging Face folder of safetensors, as `build(weights_path=...)` does.

        Optimizers keep their state, except after `meta()`, which dropped it: then they begin anew.

        Raises:
            FileNotFoundError: no weights in `folder`.
            WeightSyncError: they do not fit the module; nothing was changed.
        """
        safetensors_index(Path(folder))
        self._run("load", _absolute(folder), self._epoch, timeout_s=self._timeout_s)
        self._residency = Residency.DEVICE

    @overload
    def save_state(self, folder: str | Path, *, asynchronous: Literal[False] = False) -> None: ...
    @overload
    def save_state(self, folder: str | Path, *, asynchronous: Literal[True]) -> SaveHandle: ...
    def save_state(self, folder: str | Path, *, asynchronous: bool = False) -> SaveHandle | None:
        """Write all that training resumes from; the folder appears complete or not at all.

        The state may be on the devices or wait in host memory. With `asynchronous`, on the devices only, it is copied
        to host memory and written in the background: training, and moves off the devices, may go on at once. A save
        that starts while another is being written waits for that one.
        """
        if asynchronous or self._residency is not Residency.HOST:
            self._check_resident()
        if not asynchronous:
            self._run("save_state", _absolute(folder), self._epoch, timeout_s=self._timeout_s)
            return None
        numbers = self._run("start_save", _absolute(folder), self._epoch, timeout_s=self._timeout_s)
        results = partial(self._run, "save_result", numbers[0], timeout_s=self._timeout_s)
        return SaveHandle(self.name, Path(folder).absolute(), results)

    def load_state(self, folder: str | Path) -> None:
        """Take a saved state back, whatever the number of ranks it was saved on.

        Raises:
            FileNotFoundError: there is no complete state in `folder`.
        """
        if not (Path(folder) / STATE_FILE).is_file():
            raise FileNotFoundError(f"no training state in {folder}: {STATE_FILE} is missing")
        self._run("load_state", _absolute(folder), self._epoch, timeout_s=self._timeout_s)
        self._residency = Residency.DEVICE

    # ---- below -------------------------------------------------------------------------------------------------

    def _end(self, *, graceful: bool) -> None:
        self._epoch = None
        channels, self._channels = self._channels, None
        if graceful and channels is not None:
            channels.close()
        super()._end(graceful=graceful)

    def _check_resident(self) -> None:
        self._workers()
        if self._residency is not Residency.DEVICE:
            raise NotResidentError(
                f"{self.name} was used while its bytes are on {self._residency.value}; call cuda() or acquire() first"
            )

    def _run(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        group = self._workers()
        try:
            return group.run(method, *args, timeout_s=timeout_s)
        except WorkerError as error:
            self._settle(group, method)
            raise plainly(error) from error.__cause__

    def _settle(self, group: WorkerGroup, method: str) -> None:
        """Make sure no rank is still waiting in a collective for the one that failed; else give the engine up."""
        if group.world_size == 1:
            return
        try:
            group.run("ping", timeout_s=SETTLE_TIMEOUT_S)
        except (WaitTimeoutError, WorkerError):
            logger.exception("%s: ranks did not come back from a failed %s(); ending its workers", self.name, method)
            self._end(graceful=False)


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"unknown dtype {dtype!r}; use for instance 'float32' or 'bfloat16'")  # noqa: TRY004
    return name


def _absolute(folder: str | Path) -> str:
    return str(Path(folder).absolute())


def _public(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")]


def _own(cls: type) -> str:
    """The methods a user's class defines itself."""
    return ", ".join(name for name, value in vars(cls).items() if isfunction(value) and not name.startswith("_"))
