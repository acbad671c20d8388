"""Tensors of somebody else's program that leave the device between its phases, and notice when they are touched.

A storage without bytes crashes whoever reads it, or is silently saved as an empty file. So while its bytes are away, a
tensor is given a class that asks for them before every operation but questions about its shape and kind; where nobody
can bring them, it refuses. Views that somebody else has of the bytes are found and guarded as well.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rlix.engine.life_cycle import Residency
from rlix.engine.movers import Mover
from rlix.engine.residency import MoveReport, ResidentSet, local_tensor, tensors_over
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
    """A named set of tensors that is on its device or in host memory, where it is not touched unless it is brought.

    It begins on the device. Nobody may use the tensors while they move, but through the guard.

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
        self._unknown: Counter[int] = Counter()  # by storage: how many hold it whom Python does not know
        self._seen: dict[int, int] = {}  # by tensor and by storage: how many held it when the bytes left
        self.lend: Lend | None = None
        """What brings the bytes for an operation on them. Without it NotResidentError is raised."""

    @property
    def on_device(self) -> bool:
        return self._resident.state is Residency.DEVICE

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device now; 0 when away."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._resident.device_bytes

    def to_host(self) -> MoveReport:
        """Free the device memory and keep the bytes in host memory. Nothing happens when already there."""
        with torch._C.DisableTorchFunctionSubclass():  # the guard stays on, where it is: others may be about to touch
            away = self.on_device
            report = self._resident.to_host()
            if away or not self._marked:
                self._mark()
        return report

    def to_device(self, *, guarded: bool = False) -> MoveReport:
        """Bring the bytes back, equal to the bit. Nothing happens when already there.

        `guarded`: operations go through the guard as if the bytes were away, so that `lend` hears of each.
        """
        with torch._C.DisableTorchFunctionSubclass():
            report = self._resident.to_device()  # when it raises, they are still away
        if not guarded:
            self._unmark()
        return report

    @contextmanager
    def readable(self) -> Iterator[None]:
        """While the block runs, the tensors may be read where they are, to save them. Nobody may write to them.

        Views of them stay guarded: they do not see the bytes in host memory.
        """
        marked = bool(self._marked)
        mine = {id(tensor) for _, tensor in self._named()}
        self._unmark(lambda tensor: id(tensor) in mine)
        try:
            with self._resident.readable():
                yield
        finally:
            if marked:
                self._mark()

    @property
    def in_use(self) -> bool:
        """Whether somebody has the bytes in sight past the guard: by a view, by a graph that can still run backward, by
        a file that is being written, or because they are not guarded."""
        with torch._C.DisableTorchFunctionSubclass():
            try:
                named = {id(tensor): local_tensor(tensor) for _, tensor in self._named()}
            except RuntimeError:  # another thread changes a module just now
                return True
            tensors_of = Counter(tensor.untyped_storage()._cdata for tensor in named.values())
            for tensor in (*named.values(), *self._marked):
                storage = tensor.untyped_storage()
                if not hasattr(tensor, _MARK) or sys.getrefcount(storage) > _references_of_a_storage():
                    return True
                held = torch._C._storage_Use_Count(storage._cdata)
                if _use_count(tensor) > self._seen.get(id(tensor), 1) or held > self._seen.get(
                    storage._cdata, tensors_of[storage._cdata] + 1
                ):
                    return True
        return False

    def _mark(self) -> None:
        names: dict[int, str] = {}
        count: Counter[int] = Counter()
        with torch._C.DisableTorchFunctionSubclass():
            for name, tensor in {id(tensor): (name, tensor) for name, tensor in self._named()}.values():
                self._mark_one(name, tensor)
                storage = local_tensor(tensor).untyped_storage()._cdata
                names.setdefault(storage, name)
                count[storage] += 1
            self._mark_views(names, count)
            self._seen = {id(tensor): _use_count(tensor) for tensor in self._marked}
            self._seen |= {storage: torch._C._storage_Use_Count(storage) for storage in names}

    def _mark_one(self, name: str, tensor: torch.Tensor) -> None:
        if not hasattr(tensor, _MARK):  # it may be another set's, too
            setattr(tensor, _MARK, _Mark(f"{name} of {self._owner}", self))
            tensor.__class__ = _away(type(tensor))
            self._marked.append(tensor)

    def _mark_views(self, names: Mapping[int, str], count: Counter[int]) -> None:
        """Who took a `.data`, a `state_dict` or a view before sees the same bytes."""
        known = count + Counter(names.keys()) + self._unknown  # and the storage's own object
        if all(torch._C._storage_Use_Count(storage) <= known[storage] for storage in names):
            return
        found: Counter[int] = Counter()
        mine = {id(tensor) for _, tensor in self._named()}
        for storage, each in tensors_over(names):
            if id(each) not in mine:
                found[storage] += 1
                self._mark_one(f"a view of {names[storage]}", each)
        for storage in names:
            self._unknown[storage] = torch._C._storage_Use_Count(storage) - count[storage] - 1 - found[storage]

    def _unmark(self, which: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        for tensor in filter(which, self._marked):
            _bare(tensor)
        self._marked = [tensor for tensor in self._marked if hasattr(tensor, _MARK)]


@dataclass(frozen=True, slots=True)
class _Mark:
    name: str
    set: GuardedSet


Lend = Callable[[Sequence[GuardedSet]], AbstractContextManager[None]]


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
    def copied(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        return _touched(type(self), kind.__deepcopy__, (), (self, memo))

    def saved(self: torch.Tensor, protocol: Any) -> Any:
        return _touched(type(self), reduced, (), (self, protocol))

    def reduced(self: torch.Tensor, protocol: Any) -> Any:
        rebuild, arguments, *more = kind.__reduce_ex__(self, protocol)
        # The attributes are pickled later, when the mark is among them again.
        return rebuild, tuple(dict(each) if each is vars(self) else each for each in arguments), *more

    # Parameter's own forms of these two ask no guard, and know the class.
    guard = {"__torch_function__": classmethod(_touched), "__deepcopy__": copied, "__reduce_ex__": saved}
    return type(f"Away{kind.__name__}", (kind,), guard)


def _bare(tensor: torch.Tensor) -> None:
    if hasattr(tensor, _MARK):
        tensor.__class__ = type(tensor).__mro__[1]
        delattr(tensor, _MARK)


def _touched(
    _cls: type, func: Callable[..., Any], _types: object, args: Sequence[object] = (), kwargs: Any = None
) -> Any:
    if func in _harmless():
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    found = {id(tensor): tensor for _, tensor in tensors_within("", [args, kwargs or {}]) if hasattr(tensor, _MARK)}
    marks: list[_Mark] = [getattr(tensor, _MARK) for tensor in found.values()]
    sets = list(dict.fromkeys(mark.set for mark in marks))
    lend = next((each.lend for each in sets), None)
    if lend is None:
        name = marks[0].name if marks else "a tensor"
        raise NotResidentError(
            f"{name} was touched ({getattr(func, '__name__', func)}) while its bytes are in host memory: the job holds "
            "no lease of the device; use it inside a phase"
        )
    with lend(sets):
        still = [(tensor, getattr(tensor, _MARK)) for tensor in found.values() if hasattr(tensor, _MARK)]
        for tensor, _ in still:
            _bare(tensor)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            for tensor, mark in still:
                tensor.__class__ = _away(type(tensor))
                setattr(tensor, _MARK, mark)


def _use_count(tensor: Any) -> int:
    """How many hold the tensor: the interpreter, and graphs that will run backward through it."""
    return int(tensor._use_count())


@cache
def _references_of_a_storage() -> int:
    """That the interpreter counts while `in_use` looks and nobody else has it."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


@cache
def _harmless() -> frozenset[Any]:
    """What may be asked of a tensor without bytes; gradients may also be dropped."""
    tensor: Any = torch.Tensor
    getters = [getattr(getattr(tensor, name, None), "__get__", None) for name in _GETTERS]
    setters = [tensor.grad.__set__, tensor.grad.__delete__, tensor.requires_grad.__set__]
    methods = [getattr(tensor, name, None) for name in _METHODS]
    functions = [torch.is_complex, torch.is_floating_point, torch.numel]
    return frozenset(each for each in (*getters, *setters, *methods, *functions) if each is not None)
