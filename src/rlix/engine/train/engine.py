"""`TrainEngine`: a training module spread over devices, used as if it were one object in this process."""

import difflib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import getattr_static, isfunction, signature
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rlix.engine import placement
from rlix.engine.base import merged, named_dtype
from rlix.engine.life_cycle import Life, Residency, joint
from rlix.engine.parallel import Items, combine
from rlix.engine.residency import MoveReport
from rlix.engine.time_limits import folder_bytes, loading_s
from rlix.engine.train import sequence
from rlix.engine.train.arguments import for_ranks
from rlix.engine.train.executor import TrainExecutor, find
from rlix.engine.train.layout import Layout, as_wide, asked_layout
from rlix.engine.train.lifecycle import StartedAs
from rlix.engine.train.materialize import ModuleSpec, module_description
from rlix.engine.train.state_calls import StateCalls
from rlix.engine.train.weights_source import weights_folder
from rlix.engine.train.worker import TrainStatus
from rlix.nn import BaseTrainModule, is_configuring, reduction_of, undone_by
from rlix.protocol.errors import WorkerError
from rlix.protocol.messages import Device, Fence, Process

logger = logging.getLogger(__name__)


class TrainEngine(StateCalls):
    """A handle on a module that trains on one or more devices.

    Args:
        module: an instance built under `torch.device("meta")` (its class and arguments are what counts), or a pair of
            module class and its configuration: a dict of keyword arguments, one positional argument, or, of a
            transformers class, a model's folder or hub name, whose weights are then loaded too.
        executor: how it is spread: "fsdp2", another name that was registered, "package.module:Class", or a
            `TrainExecutor` itself.
        name: of the workers, in logs and errors.

    After `build`, every public method of the module can be called on the engine, and the engine itself, which calls
    `forward`. It runs on all ranks; arguments wrapped in `NeedParallel` are split over the data-parallel ones.
    """

    def __init__(
        self,
        module: BaseTrainModule | tuple[type[BaseTrainModule], Any],
        executor: str | type[TrainExecutor] = "fsdp2",
        *,
        name: str = "train",
    ) -> None:
        super().__init__(name)
        self._executor = find(executor)
        self._class, self._args, self._kwargs = module_description(module)

    def build(
        self,
        *,
        data_parallel_size: int | None = None,
        shard: int | None = None,
        tensor_parallel_size: int = 1,
        sequence_parallel_size: int = 1,
        devices: Sequence[Device] | None = None,
        colocate_with: placement.Placed | Sequence[placement.Placed] | None = None,
        not_colocate_with: placement.Placed | Sequence[placement.Placed] | None = None,
        acceptable_node_ips: Sequence[str] | None = None,
        weights_path: str | Path | None = None,
        random_weights: bool = False,
        seed: int | None = None,
        lease: Fence | None = None,
        name_holders: Callable[[Mapping[int, Process]], object] | None = None,
        dtype: str | torch.dtype = "float32",
        compute_dtype: str | torch.dtype | None = None,
        namespace: str | None = None,
        start: Literal["fork", "spawn"] = "fork",
        build_timeout_s: float | None = None,
        call_timeout_s: float = 3600.0,
        collective_timeout_s: float = 600.0,
    ) -> Self:
        """Start the workers and fill the module. On failure nothing is left behind.

        Args:
            data_parallel_size: parts that a batch is split into; default: as many as `devices` allow, else `shard`.
            shard: data-parallel ranks that hold one copy of weights and optimizer state between them; default 1.
            tensor_parallel_size: ranks that compute on one part of a batch together, each with a part of every layer.
                "fsdp2" does not cut layers and reads it as `shard`, `data_parallel_size` then counting the copies.
            sequence_parallel_size: ranks that compute on one part of a batch together, each on a stretch of every
                sequence: what activations of long sequences take is spread over them. "fsdp2" does it for transformers
                models with full attention, whose heads it divides; shard over all ranks with it.
            devices: one per rank, in rank order; default: chosen from the pool, preferring free ones.
            weights_path: a local Hugging Face folder of safetensors; default: the model that the module was named by
                (`TrainEngine((Policy, path))`, or a configuration from `AutoConfig.from_pretrained`), if any.
            random_weights: start from random weights, drawn from `seed` and the same on every layout, though the
                configuration comes from a model that has weights.
            lease: under which the devices are used, as if `acquire`d at once; default: this program's own.
            name_holders: given the workers' processes by rank before they use a device, also when others take their
                place; in a job `lambda processes: client.name_holders("actor_train", processes)`.
            dtype: of parameters and optimizer state; `compute_dtype` (e.g. "bfloat16") of forward and backward.
            build_timeout_s: longest the workers may take to start and to read the weights; default: 5 minutes, and a
                second for each 50 MB of them.
            call_timeout_s: longest any method may take; `collective_timeout_s`: longest a rank waits for the others.

        Raises:
            ValueError: sizes and devices do not agree, no devices fit, or the executor cannot have this layout.
            FileNotFoundError: no weights at `weights_path`, or where the configuration comes from.
            DeviceBusyError: somebody else has bytes on a device; names the process and its job.
            WorkerError, WaitTimeoutError: a worker failed to start, or did not in time.
        """
        count = None if devices is None else len(devices)
        asked = asked_layout(tensor_parallel_size, data_parallel_size, shard, count, sequence_parallel_size)
        layout = self._arranged(asked)
        if random_weights and weights_path is not None:
            raise ValueError("give weights_path or random_weights=True, not both")
        given = (*self._args, *self._kwargs.values())
        folder = None if random_weights else weights_folder(self._class.__name__, given, weights_path)
        if folder is None and not random_weights and seed is None:
            logger.warning(
                "%s starts from random weights, because none are named: pass weights_path=..., or TrainEngine((%s, "
                "path)); to start from scratch without this warning, seed=... or random_weights=True",
                self.name,
                self._class.__name__,
            )
        chosen = self._choose_devices(
            layout.copy,
            layout.world // layout.copy,
            devices,
            colocate_with=colocate_with,
            not_colocate_with=not_colocate_with,
            acceptable_node_ips=acceptable_node_ips,
        )
        spec = ModuleSpec(
            module_class=self._class,
            args=self._args,
            kwargs=self._kwargs,
            seed=seed or 0,
            weights_path=folder,
            dtype=named_dtype(dtype),
            compute_dtype=None if compute_dtype is None else named_dtype(compute_dtype),
        )
        limit = loading_s(folder_bytes(folder)) if build_timeout_s is None else build_timeout_s
        self._timeout_s = call_timeout_s
        self._started_as = StartedAs(self._executor, spec, namespace, start, limit, collective_timeout_s, name_holders)
        self._adopt(self._start(chosen, layout, spec, lease), chosen, layout, lease)
        return self

    def resize(
        self,
        *,
        devices: Sequence[Device] | None = None,
        data_parallel_size: int | None = None,
        shard: int | None = None,
        tensor_parallel_size: int | None = None,
        sequence_parallel_size: int | None = None,
        lease: Fence | None = None,
        **where: Any,
    ) -> None:
        """Go on on other devices, or spread otherwise: with the same weights, optimizer state and schedulers.

        New workers are started, and take the state through host memory, which holds it twice meanwhile. They are on
        the devices then, under `lease` or the one the engine has. Pending gradients are dropped, and attributes of the
        module are what `on_weights_materialized`, methods marked `rlix.nn.configures` and `load_training_state` make
        of them. What was published before can no longer be pulled: publish again.

        Args:
            devices, data_parallel_size, shard, tensor_parallel_size, sequence_parallel_size: as for `build`; without
                any size the layout stays as it is, as wide as the devices allow.
            where: `colocate_with`, `not_colocate_with`, `acceptable_node_ips`, as for `build`.

        Raises:
            ValueError: as `build`. NotResidentError: there are no bytes to move.
            WorkerError, WaitTimeoutError, DeviceBusyError: a new worker failed; the engine is as it was, in host
                memory.
        """
        self._check_readable()
        count = None if devices is None else len(devices)
        sizes = (data_parallel_size, shard, tensor_parallel_size, sequence_parallel_size)
        if all(size is None for size in sizes):
            layout = as_wide(self._layout, self._layout.world if count is None else count)
        else:
            asked = asked_layout(
                tensor_parallel_size or 1, data_parallel_size, shard, count, sequence_parallel_size or 1
            )
            layout = self._arranged(asked)
        placement.vacate(self)  # its own devices are as good as free ones
        try:
            chosen = placement.choose(layout.world, devices=devices, bundle=layout.copy, **where)
        finally:
            placement.occupy(self, self.devices)
        with self._busy():
            self._settle_saves()
            self._replace(chosen, layout, lease or self._lease)

    def _arranged(self, asked: Layout) -> Layout:
        if asked.sequence > 1 and not self._executor.computes_stretches:
            raise ValueError(
                f"sequence_parallel_size={asked.sequence}: executor {self._executor.__name__} does not compute on "
                "parts of sequences; 'fsdp2' does"
            )
        if asked.sequence > 1 and issubclass(self._class, PreTrainedModel):  # before workers have started in vain
            for given in (*self._args, *self._kwargs.values()):
                if isinstance(given, PretrainedConfig):
                    sequence.check(given, self._class.__name__, asked.sequence)
        return self._executor.arrange(asked)

    # ---- methods of the module ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_module("forward", *args, **kwargs)

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
        self._check_arguments(name, args, kwargs)
        layout = self._layout
        given = for_ranks(layout, args, kwargs)
        method = getattr(self._class, name)
        chosen = reduction_of(method) or ("first" if given.items is None else "gather")
        first = chosen == "first"
        try:
            answers = self._run(
                "call",
                name,
                given.args,
                given.kwargs,
                self._epoch,
                first,
                timeout_s=self._timeout_s,
                split_for=layout,
            )
        except WorkerError as error:
            _say_items(error, given.items, given.parts)
            raise
        if is_configuring(method):
            self._configured.append((name, args, kwargs))
        if (undone := undone_by(method)) is not None:
            self._configured = [call for call in self._configured if (call[0], call[1][:1]) != (undone, args[:1])]
        results = [answers[given.parts.index(part)] for part in range(layout.data)]
        return combine(results, chosen, given.items)

    def read(self, name: str, /, *args: Any) -> Any:
        """Call a method of the module that only reads its own tensors, without collectives; what rank 0 returns.

        Unlike other methods it can be called while the bytes wait in host memory.
        """
        self._check_readable()
        return self._run("read", name, args, self._epoch, timeout_s=self._timeout_s)[0]

    def _check_arguments(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError here for arguments that the method does not take, before any rank is asked."""
        method = getattr_static(self._class, name, None)
        if isfunction(method):
            try:
                signature(method, follow_wrapped=False).bind(None, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self._class.__name__}.{name}(): {error}") from None

    # ---- residency ---------------------------------------------------------------------------------------------

    def acquire(self, lease: Fence | int, devices: Sequence[Device] | None = None) -> MoveReport:
        """Bring the bytes on the devices under a lease, given by its fence or its epoch; later calls run under it.

        Args:
            devices: the lease's, in the order of the ranks; default: those it is on. If they are others, it goes on
                there with what it has, as after `resize`; on as many it learns the same to the bit. Workers that it
                leaves wait there, without bytes, so that it comes back to the last `SPARE_GROUPS` places sooner, and
                what they have published can still be pulled.

        Raises:
            StaleEpochError: the lease has ended for this engine, or a device has been used under a later one.
            DeviceBusyError: somebody else has bytes on a device; names the process and its job.
            WorkerError, WaitTimeoutError: a worker on other devices failed. After this, and a busy one of them, the
                engine is as it was, in host memory.
        """
        if devices is not None and tuple(devices) != self.devices:
            return self._move_to(tuple(devices), lease)
        report = self._move("acquire", Residency.DEVICE, lease)
        self._hold(lease)
        return report

    def _move_to(self, devices: tuple[Device, ...], lease: Fence | int) -> MoveReport:
        self._check_readable()
        begun = time.perf_counter()
        with self._busy():
            self._replace(devices, as_wide(self._layout, len(devices)), lease, back=True)
        return MoveReport(sum(status.device_bytes for status in self.status()), time.perf_counter() - begun)

    def release(self, epoch: int) -> MoveReport:
        """Free the devices' memory (bytes go to the host) and end the epoch."""
        report = self._move("release", Residency.HOST, epoch)
        self._ended = max(self._ended, epoch)
        self._hold(None)
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
        try:
            reports: list[MoveReport] = self._run(method, *args, timeout_s=self._timeout_s)
        except BaseException:  # raised again: some ranks may have moved
            self._known = self._group is None
            raise
        self._moved(state)
        return merged(reports)

    def _ask_workers(self) -> Life:
        return joint([status.life for status in self.status()], "rank")


def _say_items(error: WorkerError, items: Items | None, of_rank: Sequence[int]) -> None:
    """Add to an error which items of a split batch its rank had."""
    rank = getattr(error, "rank", None)
    if items is None or rank is None:
        return
    mine = tuple(dict.fromkeys(items[of_rank[rank]]))  # one that pads is there more than once
    neighbours = mine[-1] - mine[0] < len(mine)
    which = f"items {mine[0]} to {mine[-1]}" if neighbours else f"{len(mine)} items from {mine[0]} to {mine[-1]}"
    error.items = mine  # type: ignore[attr-defined]
    error.args = (f"{error} ({which} of the split batch)",)


def _public(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")]


def _own(cls: type) -> str:
    """The methods a user's class defines itself."""
    return ", ".join(name for name, value in vars(cls).items() if isfunction(value) and not name.startswith("_"))
