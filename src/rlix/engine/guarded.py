"""Tensors of somebody else's program that leave the device between its phases, and say so when they are touched.

A storage without bytes crashes whoever reads it, or is silently saved as an empty file. So while its bytes are away, a
tensor is given a class that refuses every operation but questions about its shape and kind.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from rlix.engine.life_cycle import Residency
from rlix.engine.movers import Mover
from rlix.engine.residency import MoveReport, ResidentSet
from rlix.protocol.errors import NotResidentError

Named = Iterable[tuple[str, torch.Tensor]]

_MARK = "_rlix_away"
_GETTERS = (
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "ndim", "names", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "itemsize", "grad_fn", "_version", "_backward_hooks", "is_nested",
)  # fmt: skip
_METHODS = (
    "size", "numel", "nelement", "dim", "ndimension", "stride", "element_size", "is_floating_point", "is_complex",
    "storage_offset", "requires_grad_", "is_contiguous", "get_device", "type", "__hash__", "__len__", "is_inference",
)  # fmt: skip


class GuardedSet:
    """A named set of tensors that is on its device or in host memory, where touching it raises NotResidentError.

    It begins on the device. Not thread-safe: nobody may use the tensors while they move. A view or a `.data` that
    somebody took before is another tensor, which nothing guards.

    Args:
        owner: whose tensors they are, for errors.
        named: asked at every move away, because gradients and optimizer state come and go.
    """

    def __init__(
        self, owner: str, named: Callable[[], Named], device: torch.device, *, mover: Mover | None = None
    ) -> None:
        self._owner = owner
        self._named = named
        self._resident = ResidentSet(owner, lambda: [tensor for _, tensor in named()], device, mover=mover)
        self._marked: list[torch.Tensor] = []

    @property
    def on_device(self) -> bool:
        return self._resident.state is Residency.DEVICE

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device now; 0 when away."""
        return self._resident.device_bytes

    def to_host(self) -> MoveReport:
        """Free the device memory and keep the bytes in host memory. Nothing happens when already there."""
        report = self._resident.to_host()
        if not self._marked:
            self._mark()
        return report

    def to_device(self) -> MoveReport:
        """Bring the bytes back, equal to the bit. Nothing happens when already there."""
        report = self._resident.to_device()  # when it raises, they are still away
        self._unmark()
        return report

    @contextmanager
    def readable(self) -> Iterator[None]:
        """While the block runs, the tensors may be read where they are, to save them. Nobody may write to them."""
        marked = bool(self._marked)
        self._unmark()
        try:
            with self._resident.readable():
                yield
        finally:
            if marked:
                self._mark()

    def _mark(self) -> None:
        for name, tensor in self._named():
            if not hasattr(tensor, _MARK):  # it may be named twice
                setattr(tensor, _MARK, f"{name} of {self._owner}")
                tensor.__class__ = _away(type(tensor))
                self._marked.append(tensor)

    def _unmark(self) -> None:
        for tensor in self._marked:
            tensor.__class__ = type(tensor).__mro__[1]
            delattr(tensor, _MARK)
        self._marked = []


def named_tensors(*parts: torch.nn.Module | torch.optim.Optimizer | None) -> Named:
    """The parameters, gradients and buffers of modules, and the state of optimizers; each tensor once."""
    seen: set[int] = set()
    for part in parts:
        if part is None:
            continue
        for name, tensor in _of_module(part) if isinstance(part, torch.nn.Module) else _of_optimizer(part):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def tensors_within(name: str, value: object) -> Named:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_within(f"{name} {key!r}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from tensors_within(name, item)


def _of_module(module: torch.nn.Module) -> Named:
    for name, parameter in module.named_parameters():
        yield f"parameter {name!r}", parameter
        if parameter.grad is not None:
            yield f"gradient of {name!r}", parameter.grad
    for name, buffer in module.named_buffers():
        yield f"buffer {name!r}", buffer


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Named:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer state {key!r}", value


@cache
def _away(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(f"Away{kind.__name__}", (kind,), {"__torch_function__": classmethod(_refuse)})


def _refuse(
    _cls: type, func: Callable[..., Any], _types: object, args: Sequence[object] = (), kwargs: Any = None
) -> Any:
    if func in _harmless():
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    found = (tensor for _, tensor in tensors_within("", [args, kwargs or {}]))
    name = next((mark for tensor in found if (mark := vars(tensor).get(_MARK))), "a tensor")
    raise NotResidentError(
        f"{name} was touched ({getattr(func, '__name__', func)}) while its bytes are in host memory: the job holds no "
        "lease of the device; use it inside a phase"
    )


@cache
def _harmless() -> frozenset[Any]:
    """What may be asked of a tensor without bytes; gradients may also be dropped."""
    tensor: Any = torch.Tensor
    getters = [getattr(getattr(tensor, name, None), "__get__", None) for name in _GETTERS]
    setters = [tensor.grad.__set__, tensor.grad.__delete__, tensor.requires_grad.__set__]
    methods = [getattr(tensor, name, None) for name in _METHODS]
    functions = [torch.is_complex, torch.is_floating_point, torch.numel]
    return frozenset(each for each in (*getters, *setters, *methods, *functions) if each is not None)
