"""Batches: lists, tensors, arrays, and dicts of them, all with as many rows; how to cut and join them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlix.flow.even import bounds


def rows(batch: Any) -> int:
    """Raises ValueError: it is no batch, or its members have not all as many rows."""
    if isinstance(batch, dict):
        counts = {name: rows(member) for name, member in batch.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"the members of a batch must have as many rows each, not {counts}")
        return next(iter(counts.values()))
    if isinstance(batch, list):
        return len(batch)
    if isinstance(batch, torch.Tensor | np.ndarray) and batch.ndim:
        return int(batch.shape[0])
    raise ValueError(f"a batch is a list, a tensor, an array, or a dict of them, not {type(batch).__name__}")


def cut(batch: Any, start: int, stop: int) -> Any:
    """Rows `start` to `stop`, as views where that can be."""
    if isinstance(batch, dict):
        return {name: cut(member, start, stop) for name, member in batch.items()}
    return batch[start:stop]


def join(batches: Sequence[Any]) -> Any:
    """Shares in order as one batch. Raises ValueError: they are of different kinds, or have different members."""
    first = batches[0]
    if len(batches) == 1:
        return first
    kind = next(kind for kind in (dict, list, torch.Tensor, np.ndarray) if isinstance(first, kind))
    if not all(isinstance(batch, kind) for batch in batches):
        kinds = ", ".join(type(batch).__name__ for batch in batches)
        raise ValueError(f"the shares of a batch must be of one kind, not {kinds}")
    if isinstance(first, dict):
        if any(batch.keys() != first.keys() for batch in batches):
            members = "; ".join(", ".join(map(str, batch)) for batch in batches)
            raise ValueError(f"the shares of a batch must have the same members, not {members}")
        return {name: join([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list):
        return [row for batch in batches for row in batch]
    return torch.cat(list(batches)) if isinstance(first, torch.Tensor) else np.concatenate(batches)


def spans(counts: Sequence[int], rank: int, targets: int) -> list[tuple[int, int]]:
    """Of the rows of number `rank`, from which to which each of the targets gets; `counts`: how many each rank has.

    All rows together keep their order; the shares are as even as can be, the fuller ones first.
    """
    begin = sum(counts[:rank])
    inside = [min(max(bound - begin, 0), counts[rank]) for bound in bounds(sum(counts), targets)]
    return list(pairwise(inside))
