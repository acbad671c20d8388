"""Splitting a batch over data-parallel ranks and putting their results back together. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from rlix.flow.even import bounds
from rlix.nn import Reduction

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NeedParallel:
    """Marks an argument to be split along its first dimension over data-parallel ranks.

    `value` is a list, tuple, tensor, array or a (nested) dict of them, all of one length. 9 items over 4 ranks are
    3, 2, 2, 2. With `pad` the last item is repeated until the length divides evenly, and the results of the copies are
    dropped; a loss computed from a padded batch counts the copies unless the module masks them.
    """

    value: Any
    pad: bool = False


@dataclass(frozen=True, slots=True)
class Scattered:
    """A call's arguments per rank. `sizes` are items per rank (None: nothing was split); `length` excludes padding."""

    args: tuple[tuple[Any, ...], ...]
    kwargs: tuple[dict[str, Any], ...]
    sizes: tuple[int, ...] | None
    length: int


def split_sizes(length: int, parts: int) -> tuple[int, ...]:
    """As even as possible, larger parts first: 9 over 4 is 3, 2, 2, 2."""
    return tuple(end - begin for begin, end in pairwise(bounds(length, parts)))


def dealt(items: Sequence[T], parts: int) -> tuple[list[int], list[list[T]]]:
    """The numbers of the parts that get any of the items, and what each gets: neighbours stay together."""
    shares = [list(items[begin:end]) for begin, end in pairwise(bounds(len(items), parts))]
    numbers = [part for part, share in enumerate(shares) if share]
    return numbers, [shares[part] for part in numbers]


def scatter(args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> Scattered:
    """Replace every `NeedParallel`, at any depth of the arguments, by each rank's piece.

    Raises:
        ValueError: pieces of different lengths, or fewer items than ranks without padding.
        TypeError: a value that has no first dimension.
    """
    marks = list(_marks([*args, *kwargs.values()]))
    if not marks:
        return Scattered((args,) * parts, (kwargs,) * parts, None, 0)
    lengths = {length for mark in marks for length in _lengths(mark.value)}
    if len(lengths) != 1:
        raise ValueError(f"everything split in one call needs the same length, got {sorted(lengths)}")
    length = lengths.pop()
    if length == 0:
        raise ValueError("NeedParallel was given an empty batch")
    pads = {mark.pad for mark in marks}
    if len(pads) > 1:
        raise ValueError("give pad=True to every NeedParallel of a call, or to none")
    padded = length + (-length % parts if pads.pop() else 0)
    if padded < parts:
        raise ValueError(
            f"NeedParallel of {length} item(s) over {parts} data-parallel ranks leaves ranks without work; "
            "use a larger batch or NeedParallel(..., pad=True)"
        )
    sizes = split_sizes(padded, parts)
    pieces = []
    for rank, size in enumerate(sizes):
        start = sum(sizes[:rank])
        pieces.append((_take(list(args), start, start + size), _take(kwargs, start, start + size)))
    return Scattered(tuple(tuple(a) for a, _ in pieces), tuple(k for _, k in pieces), sizes, length)


def combine(results: Sequence[Any], reduction: Reduction, sizes: tuple[int, ...] | None, length: int) -> Any:
    """One result from those of all ranks, in rank order; `sizes` and `length` as `scatter` gave them."""
    if reduction == "first":
        return results[0]
    if reduction == "all":
        return list(results)
    if reduction == "gather":
        padded = sum(sizes) if sizes else 0
        return _gather(results, padded, length)
    weights = [1.0] * len(results)
    if reduction == "mean":
        counts = sizes or (1,) * len(results)
        weights = [count / sum(counts) for count in counts]
    return _weighted(results, weights)


def like(first: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values as a dictionary of the first's kind: of transformers' outputs, whose keys are attributes too.

    What such an output caches for the next token stays on the rank that computed it.
    """
    if not hasattr(first, "to_tuple"):
        return values
    return type(first)(**{key: value for key, value in values.items() if key != "past_key_values"})


def _gather(results: Sequence[Any], padded: int, length: int) -> Any:
    first = results[0]
    if isinstance(first, dict):
        return like(first, {key: _gather([result[key] for result in results], padded, length) for key in first})
    if isinstance(first, torch.Tensor) and first.dim():
        joined: Any = torch.cat(list(results))
    elif isinstance(first, np.ndarray) and first.ndim:
        joined = np.concatenate(results)
    elif isinstance(first, list):
        joined = [item for result in results for item in result]
    elif isinstance(first, tuple):
        joined = tuple(item for result in results for item in result)
    else:
        return None if all(result is None for result in results) else list(results)
    return joined[:length] if len(joined) == padded else joined


def _weighted(results: Sequence[Any], weights: Sequence[float]) -> Any:
    first = results[0]
    if isinstance(first, dict):
        return {key: _weighted([result[key] for result in results], weights) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_weighted(list(items), weights) for items in zip(*results, strict=True))
    if first is None:
        return None
    return sum((result * weight for result, weight in zip(results[1:], weights[1:], strict=True)), first * weights[0])


def _marks(value: Any) -> list[NeedParallel]:
    if isinstance(value, NeedParallel):
        return [value]
    if isinstance(value, dict):
        return [mark for item in value.values() for mark in _marks(item)]
    if type(value) in (list, tuple):
        return [mark for item in value for mark in _marks(item)]
    return []


def _lengths(value: Any) -> set[int]:
    if isinstance(value, dict):
        return {length for item in value.values() for length in _lengths(item)}
    if isinstance(value, torch.Tensor | np.ndarray):
        if not value.ndim:
            raise TypeError("NeedParallel cannot split a tensor or array without dimensions")
        return {int(value.shape[0])}
    if isinstance(value, list | tuple):
        return {len(value)}
    raise TypeError(f"NeedParallel splits lists, tuples, tensors, arrays and dicts of them, not {type(value).__name__}")


def _take(value: Any, start: int, stop: int) -> Any:
    """A copy of the arguments in which each mark is replaced by its items `start` to `stop`."""
    if isinstance(value, NeedParallel):
        return _slice(value.value, start, stop)
    if isinstance(value, dict):
        return {key: _take(item, start, stop) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(item, start, stop) for item in value)
    return value


def _slice(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {key: _slice(item, start, stop) for key, item in value.items()}
    last = len(value) - 1
    if stop <= len(value):
        piece = value[start:stop]
        # A view would travel with all of the tensor it is a part of.
        return piece.clone() if isinstance(piece, torch.Tensor) else piece
    # Beyond the end lies padding: the last item, again and again.
    positions = [min(position, last) for position in range(start, stop)]
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[positions]
    return type(value)(value[position] for position in positions)
