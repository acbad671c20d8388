"""What a training backend must do: the contract between a `TrainEngine` and whatever spreads a module over ranks.

A backend is a class that extends `TrainExecutor`. An engine is given the class (`TrainEngine(module, MyExecutor)`),
`"package.module:MyExecutor"`, or a name under which it was registered; no file of RLix needs to change.
`tests/engine/conformance` is what any of them has to pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from rlix.engine.movers import Mover
from rlix.engine.residency import module_tensors
from rlix.engine.train.layout import Layout
from rlix.engine.train.materialize import ModuleSpec
from rlix.engine.train.optimizers import optimizers
from rlix.engine.train.parts import Parts
from rlix.nn import BaseTrainModule, ProcessGroups
from rlix.protocol.errors import SpecError
from rlix.workers.worker import WorkerContext


class TrainExecutor(Parts, ABC):
    """One rank's part of a backend.

    The worker around it takes the device's lock, guards epochs, moves the bytes, publishes and saves. It calls
    `connect` once and `materialize` whenever the engine comes to these devices, then `run`, each time followed by
    `settle`, and whenever they are needed what says where the tensors are: `resident`, and of `Parts` `part`, `named`
    and `exports`. All ranks call `connect`, `materialize`, `run` and the tensors of `exports` together, so these may
    communicate; the others must not.
    """

    computes_stretches: ClassVar[bool] = False
    """Whether ranks of a layout's `sequence` can each compute on a part of every sequence."""

    def __init__(self, ctx: WorkerContext, layout: Layout, device: torch.device) -> None:
        self.ctx = ctx
        self.layout = layout
        self.device = device

    @classmethod
    @abstractmethod
    def arrange(cls, asked: Layout) -> Layout:
        """The layout that the sizes a user asked for mean to this backend; asked in the user's program.

        Raises:
            ValueError: it cannot do that; says what to use instead.
        """

    def connect(self, spec: ModuleSpec, timeout_s: float) -> ProcessGroups:
        """Make the process groups, in which a rank waits for the others for at most `timeout_s`."""
        if self.layout.world == 1:
            return ProcessGroups()
        self.ctx.init_process_group(timeout_s=timeout_s)
        data = self._group(self.layout.data_ranks(), timeout_s)
        tensor = self._group(self.layout.tensor_ranks(), timeout_s)
        sequence = self._group(self.layout.sequence_ranks(), timeout_s)
        return ProcessGroups(dist.group.WORLD, data, tensor, sequence)

    @abstractmethod
    def materialize(self, spec: ModuleSpec, groups: ProcessGroups) -> BaseTrainModule:
        """The module, filled, and cut to what this rank holds of it, on `self.device`.

        Every layout has the same weights: those at `spec.weights_path`, or those a seeded initialisation gives in one
        process; undefined ones with `spec.undefined`, which a state is loaded into at once.
        """

    def run(self, module: BaseTrainModule, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the module. `forward` goes by way of `__call__`, whose hooks a backend may rely on."""
        called = module if method in ("forward", "__call__") else getattr(module, method)
        return called(*args, **kwargs)

    def settle(self, module: BaseTrainModule) -> None:
        """Free what a call gathered and kept; called after each one, also if it failed, and before bytes move."""

    def resident(self, module: BaseTrainModule) -> Iterable[torch.Tensor]:
        """What moves between device and host: everything that a checkpoint holds, and gradients."""
        return module_tensors(module, *optimizers(module).values())

    def mover(self) -> Mover | None:
        """How bytes leave the device and come back; None: as the device's kind wants it."""
        return None

    def data_part(self) -> tuple[int, int]:
        """Which part of a split batch this rank computes on, and of how many."""
        return self.layout.data_part(self.ctx.rank), self.layout.data

    def _group(self, members: list[list[int]], timeout_s: float) -> dist.ProcessGroup | None:
        """This rank's group of those listed; all ranks make all of them, in the same order."""
        if len(members[0]) == 1:
            return None
        if len(members) == 1:
            return dist.group.WORLD
        limit = timedelta(seconds=timeout_s)
        groups = {tuple(ranks): dist.new_group(ranks, timeout=limit) for ranks in members}
        return next(group for ranks, group in groups.items() if self.ctx.rank in ranks)


_EXECUTORS: dict[str, str | type[TrainExecutor]] = {"fsdp2": "rlix.engine.train.fsdp2:Fsdp2Executor"}


def register(name: str, executor: str | type[TrainExecutor]) -> None:
    """Make a backend known by a name; a string is "package.module:Class", imported when it is first used."""
    _EXECUTORS[name] = executor


def find(executor: str | type[TrainExecutor]) -> type[TrainExecutor]:
    """The class that a name, "package.module:Class", or the class itself stands for.

    Raises:
        SpecError: no backend of that name, or it cannot be imported. TypeError: it is no `TrainExecutor`.
    """
    found = _EXECUTORS.get(executor, executor) if isinstance(executor, str) else executor
    if isinstance(found, str):
        module, _, name = found.partition(":")
        if not name:
            raise SpecError(
                f"unknown executor {executor!r} for TrainEngine; known: {', '.join(_EXECUTORS)}, "
                'a class, or "package.module:Class"'
            )
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise SpecError(f"executor {executor!r}: {error}; it must be module:Class, importable here") from None
    if not (isinstance(found, type) and issubclass(found, TrainExecutor)):
        raise TypeError(f"executor {executor!r} is no rlix.engine.train.executor.TrainExecutor")
    return found
