"""Whole tensors out of shards, many at a time."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlix.engine.residency import local_tensor
from rlix.engine.weights.buckets import to_bytes


def whole_tensors(named: Iterable[tuple[str, torch.Tensor]], chunk_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor whole, in host memory where it was sharded, on rank 0 only; other ranks yield nothing.

    All ranks must iterate it to the end, with the same tensors in the same order. Shards travel together, in transfers
    of about `chunk_bytes` for all ranks: one collective for many small tensors instead of one each. Tensors are
    detached; they share memory with the module or with a transfer buffer, so copy those you keep.

    Replicas of a shard other than the first take no part. Supported are plain tensors, and DTensors that one dimension
    of one mesh cuts along whatever dimension of theirs.
    """
    batch: list[tuple[str, DTensor]] = []
    size = 0
    for name, tensor in named:
        if not isinstance(tensor, DTensor) or all(isinstance(how, Replicate) for how in tensor.placements):
            yield from _plain(name, local_tensor(tensor))
            continue
        if size and size + tensor.nbytes > chunk_bytes:
            yield from _gather(batch)
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield from _gather(batch)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not dist.is_initialized() or dist.get_rank() == 0:
        yield name, tensor.detach()


def _gather(batch: list[tuple[str, DTensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """One transfer: each rank sends its shards of the batch as one flat buffer of bytes, the cut dimension first.

    It is cut as `torch.chunk` does, in pieces of ceil(n / ranks) rows, of which the last may be short or absent. Every
    rank reserves room for whole pieces, so that all buffers have one size.
    """
    group, ranks = _shard_group(batch[0][1])
    if group is None:
        return
    me = dist.get_group_rank(group, dist.get_rank())
    slots = [_slot_bytes(tensor, ranks) for _, tensor in batch]
    # NCCL moves device memory only; shards that wait in host memory pass through it one transfer at a time.
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else batch[0][1].to_local().device
    flat = torch.empty(sum(slots), dtype=torch.uint8, device=device)
    start = 0
    for (_, tensor), slot in zip(batch, slots, strict=True):
        local = to_bytes(tensor.to_local().movedim(_cut(tensor)[1], 0))
        flat[start : start + local.numel()] = local
        start += slot
    pieces = [torch.empty_like(flat) for _ in range(ranks)] if me == 0 else None
    dist.gather(flat, pieces, group=group, group_dst=0)
    if pieces is None:
        return
    pieces = [piece.cpu() for piece in pieces]
    start = 0
    for (name, tensor), slot in zip(batch, slots, strict=True):
        # Only the last pieces are short, so the whole is the pieces one after the other, cut to length.
        whole = torch.cat([piece[start : start + slot] for piece in pieces])[: tensor.nbytes]
        dim = _cut(tensor)[1]
        rows, *others = tensor.shape[dim], *tensor.shape[:dim], *tensor.shape[dim + 1 :]
        yield name, whole.view(tensor.dtype).view(rows, *others).movedim(0, dim)
        start += slot


def _slot_bytes(tensor: DTensor, ranks: int) -> int:
    rows = tensor.shape[_cut(tensor)[1]]
    return -(-rows // ranks) * (tensor.nbytes // rows) if rows else 0


def _shard_group(tensor: DTensor) -> tuple[Any, int]:
    """The ranks that hold the first replica between them, or None for a rank of another replica."""
    mesh, (cutting, _) = tensor.device_mesh, _cut(tensor)
    place = mesh.get_coordinate()
    if place is None or any(at for dim, at in enumerate(place) if dim != cutting):
        return None, 0
    return mesh.get_group(cutting), mesh.size(cutting)


def _cut(tensor: DTensor) -> tuple[int, int]:
    """Which dimension of the mesh cuts the tensor, and along which of its own.

    Raises:
        NotImplementedError: several do, or in another way than `torch.chunk`.
    """
    cuts = [(dim, how) for dim, how in enumerate(tensor.placements) if not isinstance(how, Replicate)]
    dim, how = cuts[0]
    if len(cuts) > 1 or type(how) is not Shard:
        raise NotImplementedError(f"only what one dimension of a mesh cuts can be gathered: {tensor.placements}")
    return dim, how.dim % tensor.ndim
