"""Where a training module keeps its optimizers and learning-rate schedulers."""

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

T = TypeVar("T")

_OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has, which holds no optimizers."""
_DEPTH = 3  # of lists in lists; nothing is as deep, but a list may hold itself


def optimizers(module: nn.Module) -> dict[str, Optimizer]:
    """By name: attributes of the module or of a submodule, and what is in a list, tuple or dictionary that is one.

    Names are like `optimizer`, `optimizers.0`, `by_part.head` and `critic.optimizer`; of one under several names the
    first counts.
    """
    return _found(module, Optimizer)


def schedulers(module: nn.Module) -> dict[str, LRScheduler]:
    """By name, as `optimizers`."""
    return _found(module, LRScheduler)


def _found(module: nn.Module, kind: type[T]) -> dict[str, T]:
    found: dict[str, T] = {}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in _OF_MODULES:
                continue
            for name, item in _items(f"{path}.{attribute}" if path else attribute, value, _DEPTH):
                if isinstance(item, kind) and id(item) not in seen:
                    seen.add(id(item))
                    found[name] = item
    return found


def _items(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if not depth:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _items(f"{name}.{key}", item, depth - 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _items(f"{name}.{index}", item, depth - 1)
    else:
        yield name, value
