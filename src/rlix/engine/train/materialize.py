"""Building a training module on its worker: weights from a seed or a checkpoint, cut to this rank's part as it goes.

Every layout gets the same weights. A seeded init runs as plain PyTorch would, whole and on the CPU, on every rank. A
checkpoint is read unit by unit, and of each tensor what this rank will hold: one transformer block is filled, cut and
shrunk to this rank's part before the next one is read. So memory in use peaks at the parts plus one block.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from rlix.engine.model_source import ModelSource
from rlix.engine.residency import local_tensor
from rlix.engine.train.adapters import base_names
from rlix.engine.train.stored import InMemory, Stored, converted, in_folder
from rlix.engine.weights.boxes import Piece, extent, slices, whole
from rlix.engine.weights.buckets import part_of
from rlix.engine.weights.publication import named_weights, tied_names
from rlix.engine.weights.shards import pieces_of
from rlix.nn import BaseTrainModule
from rlix.protocol.errors import WeightSyncError

S = TypeVar("S", bound=Stored)

_PATCHING = threading.RLock()  # all threads share the method of torch that is replaced for a while


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """What a worker needs to build its module. dtypes are torch's names; `weights_path` is a Hugging Face folder.

    `undefined`: parameters have a place and no values, because a state is loaded into them at once.
    """

    module_class: type[BaseTrainModule]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    weights_path: str | None = None
    dtype: str = "float32"
    compute_dtype: str | None = None
    undefined: bool = False

    @property
    def computes_as_stored(self) -> bool:
        return self.compute_dtype in (None, self.dtype)


def build_module(
    spec: ModuleSpec,
    device: torch.device,
    cut: Callable[[nn.Module], object] | None = None,
    held: Callable[[tuple[int, ...]], Sequence[Piece]] | None = None,
) -> BaseTrainModule:
    """The module with its weights on `device`.

    `cut` is given each unit as it is filled (the module's `non_split_modules`, then the module itself), brings it to
    the device and leaves what this rank holds of it. `held` says what that will be of a tensor of some shape: no more
    is read of a checkpoint, and the rest is undefined when `cut` is called. Default: all.

    Raises:
        WeightSyncError: the checkpoint misses parameters, or holds unknown or mis-shaped ones; all are listed.
        FileNotFoundError: no safetensors weights at `weights_path`.
    """
    torch.manual_seed(spec.seed)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    source: Checkpoint | _Undefined | None = None
    if spec.weights_path is None and not spec.undefined:
        module = spec.module_class(*spec.args, **spec.kwargs)
    else:
        with parameters_on_meta():
            module = spec.module_class(*spec.args, **spec.kwargs)
        if spec.undefined or spec.weights_path is None:
            source = _Undefined()
        else:
            source = Checkpoint.in_folder(Path(spec.weights_path), module, held=held)
    blocks = [m for m in module.modules() if type(m).__name__ in module.non_split_modules()]
    for unit in [*blocks, module]:
        if source is not None:
            source.fill(unit, device, dtype)
        _cast(unit, dtype)
        if cut is not None:
            cut(unit)
    if cut is None:
        module.to(device)
    return module


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters hold no memory while their buffers are real.

    Under `torch.device("meta")` computed buffers (rotary frequencies) would be lost, and no checkpoint holds them.
    Each parameter goes to meta the moment it is registered, before its initialiser would write to it.
    """
    thread = threading.get_ident()  # modules of other threads keep their bytes
    with _PATCHING:
        register = nn.Module.register_parameter

        def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta and threading.get_ident() == thread:
                param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            register(module, name, param)

        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Undefined:
    """Fills parameters with nothing in particular."""

    def __init__(self) -> None:
        self._filled: dict[nn.Parameter, nn.Parameter] = {}

    def fill(self, unit: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        for owner in unit.modules():
            for key, param in list(owner._parameters.items()):
                if param is not None and param.is_meta:
                    if param not in self._filled:
                        kind = dtype if param.is_floating_point() else param.dtype
                        value = torch.empty(param.shape, dtype=kind, device=device)
                        self._filled[param] = nn.Parameter(value, requires_grad=param.requires_grad)
                    owner._parameters[key] = self._filled[param]


class Checkpoint:
    """Whole tensors by name, read one by one into a module that lies on meta, or that was filled before.

    `where` says in errors where they come from. `named` is the module's state dict, each tensor as the part that it is
    of a whole one (`TrainExecutor.named`).
    """

    def __init__(
        self,
        where: str,
        tensors: Mapping[str, Stored],
        module: BaseTrainModule,
        named: dict[str, torch.Tensor] | None = None,
        held: Callable[[tuple[int, ...]], Sequence[Piece]] | None = None,
    ) -> None:
        self._module, self._held = module, held
        self._bases = base_names(module)
        adapted = {base: name for name, base in self._bases.items()}
        self._stored = {adapted.get(name, name): tensor for name, tensor in tensors.items()}
        named = named_weights(module) if named is None else named
        tied = tied_names(named)
        self._source = {
            owner: next((name for name in (owner, *more) if name in self._stored), None) for owner, more in tied.items()
        }
        self._check(where, named)
        self._names = {id(named[owner]): owner for owner in tied}
        self._filled: dict[int, nn.Parameter] = {}
        self._named = named  # ids stay unique only while the tensors live

    @classmethod
    def in_folder(
        cls,
        folder: Path,
        module: BaseTrainModule,
        named: dict[str, torch.Tensor] | None = None,
        held: Callable[[tuple[int, ...]], Sequence[Piece]] | None = None,
    ) -> "Checkpoint":
        """A Hugging Face folder of safetensors, named and shaped as checkpoints are; `held` as for `build_module`."""
        where = f"weights in {folder}"
        stored = _imported(module, in_folder(folder))
        if scaled := [name for name, tensor in stored.items() if tensor.scaled]:
            raise WeightSyncError(
                f"{where} are quantized ({scaled[0]} and {len(scaled) - 1} more have 8 bits or fewer and scales beside "
                "them), and cannot be trained: name a folder of bfloat16, float16 or float32"
            )
        return cls(where, converted(module, stored, base_names(module).values()), module, named, held)

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], module: BaseTrainModule, named: dict[str, torch.Tensor] | None = None
    ) -> "Checkpoint":
        """Named and shaped as the module's own."""
        stored = {name: InMemory(tensor) for name, tensor in tensors.items()}
        return cls("weights given", _imported(module, stored), module, named)

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Further names of tied tensors, by the first."""
        return {name: more for name, more in tied_names(self._named).items() if more}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each that is stored, by its first name in the module."""
        for name, source in self._source.items():
            if source is not None:
                yield name, self._stored[source].read()

    def fill(self, unit: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Give the unit's parameters that are still on meta their values, and its persistent buffers theirs."""
        for owner in unit.modules():
            for key, param in list(owner._parameters.items()):
                if param is not None and param.is_meta:
                    if id(param) not in self._filled:
                        self._filled[id(param)] = self._load(param, device, dtype)
                    owner._parameters[key] = self._filled[id(param)]
            for buffer in owner._buffers.values():
                name = self._names.get(id(buffer))
                source = self._source.get(name) if name else None
                if buffer is not None and source is not None:
                    buffer.copy_(self._stored[source].read())

    @torch.no_grad()
    def refill(self, seed: int) -> None:
        """Give a module that was filled and sharded before the values a newly built one with this seed would have."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            for owner, source in self._source.items():
                target = self._named[owner]
                if source is None:
                    _init_new(new := torch.empty(target.shape), owner)
                stored = InMemory(new) if source is None else self._stored[source]
                for piece in pieces_of(target, owner):
                    part_of(local_tensor(target), piece.at, extent(piece.box)).copy_(stored.read(piece.box))

    def _load(self, param: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
        name = self._names[id(param)]
        source = self._source[name]
        if source is None:  # allowed to be missing: a new head or an adapter, initialised alike on every rank
            _init_new(new := torch.empty(param.shape, dtype=torch.float32), name)
        stored = InMemory(new) if source is None else self._stored[source]
        target = dtype if param.is_floating_point() else param.dtype
        # Of host memory that nobody writes to the system keeps no page.
        value = torch.empty(param.shape, dtype=target, device=device)
        shape = tuple(param.shape)
        for box in (whole(shape),) if self._held is None else (piece.box for piece in self._held(shape)):
            value[slices(box)] = stored.read(box)
        return nn.Parameter(value, requires_grad=param.requires_grad)

    def _check(self, where: str, named: dict[str, torch.Tensor]) -> None:
        optional = self._module.allow_missing
        problems = [
            f"missing: {owner}"
            for owner, source in self._source.items()
            if source is None and owner in self._bases and not any(fnmatch(owner, pattern) for pattern in optional)
        ]
        problems += [f"unknown here: {name}" for name in self._stored if name not in named]
        for owner, source in self._source.items():
            if source is not None:
                shape = self._stored[source].shape
                if shape != tuple(named[owner].shape):
                    problems.append(f"shape of {owner}: stored {list(shape)}, here {list(named[owner].shape)}")
        if problems:
            raise WeightSyncError(
                f"{where} do not fit {type(self._module).__name__} "
                f"(rename with import_name, or list new ones in allow_missing): " + "; ".join(problems)
            )


def _imported(module: BaseTrainModule, tensors: Mapping[str, S]) -> dict[str, S]:
    """Without what the module has no use for, by the names that it gives the rest."""
    return {
        module.import_name(given): tensor
        for given, tensor in tensors.items()
        if not any(fnmatch(given, pattern) for pattern in module.allow_unknown)
    }


def module_description(
    module: BaseTrainModule | tuple[type[BaseTrainModule], Any],
) -> tuple[type[BaseTrainModule], tuple[Any, ...], dict[str, Any]]:
    """Class and arguments of the module the workers are to build.

    For a transformers class a model's folder or hub name stands for its configuration.
    """
    if isinstance(module, tuple):
        module_class, config = module
        if isinstance(config, str | Path) and hasattr(module_class, "config_class"):
            config = ModelSource.of(config).load_config()
        args, kwargs = ((), dict(config)) if isinstance(config, dict) else ((config,), {})
    else:
        if not isinstance(module, BaseTrainModule):
            raise TypeError(f"TrainEngine takes a rlix.nn.BaseTrainModule, not {type(module).__name__}")
        filled = next((name for name, p in module.named_parameters() if not p.is_meta), None)
        if filled is not None:
            raise ValueError(
                f"{type(module).__name__} holds weights ({filled}) that would be dropped: build it under "
                'torch.device("meta") and pass weights_path or seed to build()'
            )
        module_class, (args, kwargs) = type(module), module.rlix_init
    if not (isinstance(module_class, type) and issubclass(module_class, BaseTrainModule)):
        raise TypeError(f"the module class must extend rlix.nn.BaseTrainModule, not {module_class!r}")
    return module_class, args, kwargs


def _init_new(value: torch.Tensor, name: str) -> None:
    if name.endswith("bias") or value.dim() < 2 or ".lora_B." in name or ".lora_embedding_A." in name:
        nn.init.zeros_(value)  # the half of a LoRA adapter that makes it begin as nothing
    elif ".lora_A." in name:
        nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    else:
        nn.init.normal_(value, std=0.02)


def _cast(unit: nn.Module, dtype: torch.dtype) -> None:
    """Floating-point parameters to `dtype`; buffers keep theirs (rotary frequencies stay float32)."""
    for param in unit.parameters():
        if param.is_floating_point() and not param.is_meta and param.dtype != dtype:
            param.data = param.data.to(dtype)
