"""What a part has on its devices, where it says nothing of that: the tensors that it keeps, moved in its stead."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from rlix.engine.guarded import GuardedSet, Named, named_tensors

CPU = torch.device("cpu")
SMALL = 32 * 2**20
"""Bytes on a device that count as none: constants of libraries, of which nobody says that they are there."""


class OwnState:
    """What a worker keeps in its attributes on its devices: modules, optimizers and tensors, and lists and mappings of
    them. It begins on them.

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
        seen: set[int] = set()
        for name, tensor in _within("", vars(self._worker)):
            if tensor.device == device and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def devices_of(kind: str) -> list[torch.device]:
    """Of this process, which sees no others than its own."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if kind == "cuda" else [CPU]


def left_behind() -> int:
    """Bytes of tensors that this process has on the fullest of its CUDA devices."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return max(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))


def _within(name: str, value: Any) -> Named:
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        yield from ((f"{name}: {of}", tensor) for of, tensor in named_tensors(value))
    elif isinstance(value, torch.Tensor):
        yield name, value
        if value.is_leaf and value.grad is not None:
            yield f"gradient of {name}", value.grad
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _within(f"{name} {key}".lstrip(), item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _within(name, item)
