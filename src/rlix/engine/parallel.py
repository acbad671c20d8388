"""Splitting a batch over data-parallel ranks and putting their results back together. Pure functions."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from rlix.nn import Reduction
from rlix.workers.even import bounds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NeedParallel:
    """Marks an argument to be split along its first dimension over data-parallel ranks.

    `value` is a list, tuple, tensor, array or a (nested) dict of them, all of one length. 9 items over 4 ranks are
    3, 2, 2, 2. With `pad` the last item is repeated until the length divides evenly, and the results of the copies are
    dropped; a loss computed from a padded batch counts the copies unless the module masks them.

    `costs`: of each item, such as its tokens, in any unit. Ranks then get as many items as always, but not neighbours:
    those with which the costliest rank, for which the others wait, has least to do. Results come back in order.
    """

    value: Any
    pad: bool = False
    costs: Sequence[float] | None = None


Items = tuple[tuple[int, ...], ...]
"""Which items of the batch each rank has; one is named more than once where it pads."""


@dataclass(frozen=True, slots=True)
class Scattered:
    """A call's arguments per rank, and which items they are (None: nothing was split)."""

    args: tuple[tuple[Any, ...], ...]
    kwargs: tuple[dict[str, Any], ...]
    items: Items | None


def neighbours(count: int, parts: int) -> Items:
    """As even as possible, larger parts first: 9 over 4 is 3, 2, 2, 2."""
    return tuple(tuple(range(begin, end)) for begin, end in pairwise(bounds(count, parts)))


def dealt(items: Sequence[T], parts: int) -> tuple[list[int], list[list[T]]]:
    """The numbers of the parts that get any of the items, and what each gets: neighbours stay together."""
    shares = [[items[item] for item in share] for share in neighbours(len(items), parts)]
    numbers = [part for part, share in enumerate(shares) if share]
    return numbers, [shares[part] for part in numbers]


def balanced(costs: Sequence[float], parts: int) -> Items:
    """As many items for each part as `neighbours` gives it, so that the costliest part has little.

    The costliest items first, each to the part with least so far that has room (Graham's rule for unequal jobs, 1969,
    with the number of items bounded). In order where that is no worse.
    """
    plain = neighbours(len(costs), parts)
    chosen: list[list[int]] = [[] for _ in plain]
    loads = [(0.0, part) for part in range(parts)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, part = heapq.heappop(loads)
        chosen[part].append(item)
        if len(chosen[part]) < len(plain[part]):
            heapq.heappush(loads, (load + costs[item], part))
    found = tuple(tuple(sorted(items)) for items in chosen)

    def most(shares: Items) -> float:
        return max(sum(costs[item] for item in items) for items in shares)

    return found if most(found) < most(plain) else plain


def scatter(args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> Scattered:
    """Replace every `NeedParallel`, at any depth of the arguments, by each rank's piece.

    Raises:
        ValueError: pieces of different lengths, fewer items than ranks without padding, or costs that are not one for
            each item.
        TypeError: a value that has no first dimension.
    """
    marks = list(_marks([*args, *kwargs.values()]))
    if not marks:
        return Scattered((args,) * parts, (kwargs,) * parts, None)
    items = _items_of(marks, parts)
    pieces = [(_take(list(args), rows), _take(kwargs, rows)) for rows in items]
    return Scattered(tuple(tuple(a) for a, _ in pieces), tuple(k for _, k in pieces), items)


def combine(results: Sequence[Any], reduction: Reduction, items: Items | None) -> Any:
    """One result from those of all ranks, in rank order; `items` as `scatter` gave them."""
    if reduction == "first":
        return results[0]
    if reduction == "all":
        return list(results)
    if reduction == "gather":
        order = [item for rows in items or () for item in rows]
        back = {item: position for position, item in reversed(list(enumerate(order)))}
        return _gather(results, len(order), [back[item] for item in sorted(back)])
    weights = [1.0] * len(results)
    if reduction == "mean":
        counts = [len(rows) for rows in items] if items else [1] * len(results)
        weights = [count / sum(counts) for count in counts]
    return _weighted(results, weights)


def like(first: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values as a dictionary of the first's kind: of transformers' outputs, whose keys are attributes too.

    What such an output caches for the next token stays on the rank that computed it.
    """
    if not hasattr(first, "to_tuple"):
        return values
    return type(first)(**{key: value for key, value in values.items() if key != "past_key_values"})


def _gather(results: Sequence[Any], count: int, places: list[int]) -> Any:
    """`places`: where the result of each item is among `count` of all ranks."""
    first = results[0]
    if isinstance(first, dict):
        return like(first, {key: _gather([result[key] for result in results], count, places) for key in first})
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
    return _chosen(joined, places) if len(joined) == count and places != list(range(count)) else joined


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


def _items_of(marks: Sequence[NeedParallel], parts: int) -> Items:
    """Which items each rank gets of what is marked in one call."""
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
    given = {tuple(mark.costs) for mark in marks if mark.costs is not None}
    if len(given) > 1 or any(len(costs) != length for costs in given):
        found = sorted({len(costs) for costs in given})
        raise ValueError(
            f"NeedParallel(costs=...): one cost for each of {length} items, the same in a call; got {found}"
        )
    if given:
        costs = given.pop()
        shares = balanced(costs + costs[-1:] * (padded - length), parts)
    else:
        shares = neighbours(padded, parts)
    return tuple(tuple(min(item, length - 1) for item in rows) for rows in shares)  # padding is the last item again


def _take(value: Any, rows: Sequence[int]) -> Any:
    """A copy of the arguments in which each mark is replaced by its items `rows`."""
    if isinstance(value, NeedParallel):
        return _chosen(value.value, rows)
    if isinstance(value, dict):
        return {key: _take(item, rows) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(item, rows) for item in value)
    return value


def _chosen(value: Any, rows: Sequence[int]) -> Any:
    """A copy of these rows alone: a view would travel with all of the tensor it is a part of."""
    if isinstance(value, dict):
        return {key: _chosen(item, rows) for key, item in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[list(rows)]
    return type(value)(value[row] for row in rows)
