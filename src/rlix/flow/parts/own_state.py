"""What a part has on its devices, where it says nothing of that: the tensors that it keeps, moved in its stead."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from rlix.engine.guarded import GuardedSet, Named, named_tensors

CPU = torch.device("cpu")
KEPT = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
SMALL = 32 * 2**20
"""Bytes on a device that count as none: constants of libraries, of which nobody says that they are there."""


class OwnState:
    """What a worker keeps in its attributes on its devices: modules, optimizers and tensors, and lists and dicts of
    them. It begins on them. What is deeper, in other objects, or in memory that is not torch's stays where it is.

    Args:
        owner: whose it is, for errors.
        devices: the torch devices of this process.
    """

    def __init__(self, owner: str, worker: object, devices: Sequence[torch.device]) -> None:
        self._worker = worker
        self._sets = [GuardedSet(owner, partial(self._on, device), device) for device in devices]

    @property
    def on_device(self) -> bool:
        return all(each.on_device for each in self._sets)

    @property
    def device_bytes(self) -> int:
        """Bytes on the fullest device now; 0 when away."""
        return max(each.device_bytes for each in self._sets)

    def to_host(self) -> None:
        for each in self._sets:
            each.to_host()

    def to_device(self) -> None:
        for each in self._sets:
            each.to_device()

    @contextmanager
    def readable(self) -> Iterator[None]:
        """While the block runs, tensors that are away may be saved, or written to, in host memory."""
        with ExitStack() as stack:
            for each in self._sets:
                stack.enter_context(each.readable())
            yield

    def _on(self, device: torch.device) -> Named:
        with torch._C.DisableTorchFunctionSubclass():  # some may be guarded already
            return [
                (name, tensor)
                for name, tensor in _within(vars(self._worker))
                if tensor.device == device and _can_leave(tensor)
            ]


def devices_of(kind: str) -> list[torch.device]:
    """Of this process, which sees no others than its own."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if kind == "cuda" else [CPU]


def left_behind() -> int:
    """Bytes of tensors that this process has on the fullest of its CUDA devices."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return max(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))


def _within(attributes: dict[str, Any]) -> Named:
    for name, value in attributes.items():
        yield from _of(name, value)
        if isinstance(value, dict):
            for key, item in zip(value, _kept(value.values()), strict=False):
                yield from _of(f"{name} {key}", item)
        elif isinstance(value, list | tuple | set | frozenset):
            for item in _kept(value):
                yield from _of(name, item)


def _kept(items: Iterable[Any]) -> Iterable[Any]:
    """Nothing, of a million items none of which is a tensor: they are looked at in every turn."""
    return items if any(issubclass(kind, KEPT) for kind in set(map(type, items))) else ()


def _of(name: str, value: Any) -> Named:
    if isinstance(value, torch.Tensor):
        yield name, value
        if value.is_leaf and value.grad is not None:
            yield f"gradient of {name}", value.grad
    elif isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        yield from ((f"{name}: {of}", tensor) for of, tensor in named_tensors(value))


def _can_leave(tensor: torch.Tensor) -> bool:
    """Not bytes that others see too, without torch: a numpy array, a file, another library's memory."""
    try:
        return tensor.untyped_storage().resizable()
    except (NotImplementedError, RuntimeError):  # sparse and functional ones have none
        return False
