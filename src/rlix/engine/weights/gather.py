"""Whole tensors out of FSDP shards, many at a time."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


def whole_tensors(
    named: Iterable[tuple[str, torch.Tensor]], chunk_bytes: int, *, on_device: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor whole, on rank 0 only; the other ranks hand in their shards and yield nothing.

    All ranks must iterate it to the end, with the same tensors in the same order. Shards travel together, in transfers
    of about `chunk_bytes` for all ranks: one collective for many small tensors instead of one each. Tensors are
    detached; they share memory with the module or with a transfer buffer, so copy those you keep. Sharded ones come
    together in host memory, or `on_device`, which then has to hold two chunks and the next one's shards.

    Replicas of a shard other than the first take no part. Only what FSDP2 makes is supported: plain tensors and
    DTensors sharded along dimension 0, over one mesh.
    """
    batch: list[tuple[str, DTensor]] = []
    size = 0
    for name, tensor in named:
        if not isinstance(tensor, DTensor):
            yield from _plain(name, tensor)
            continue
        if size and size + tensor.nbytes > chunk_bytes:
            yield from _gather(batch, on_device)
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield from _gather(batch, on_device)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not dist.is_initialized() or dist.get_rank() == 0:
        yield name, tensor.detach()


def _gather(batch: list[tuple[str, DTensor]], on_device: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """One transfer: each rank sends its shards of the batch as one flat buffer of bytes.

    FSDP2 cuts dimension 0 as `torch.chunk` does, in pieces of ceil(n / ranks) rows, of which the last may be short or
    absent. Every rank reserves room for whole pieces, so that all buffers have one size.
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
        local = tensor.to_local().detach().contiguous().reshape(-1).view(torch.uint8)
        flat[start : start + local.numel()] = local
        start += slot
    pieces = [torch.empty_like(flat) for _ in range(ranks)] if me == 0 else None
    dist.gather(flat, pieces, group=group, group_dst=0)
    if pieces is None:
        return
    if not on_device:
        pieces = [piece.cpu() for piece in pieces]
    start = 0
    for (name, tensor), slot in zip(batch, slots, strict=True):
        # Only the last pieces are short, so the whole is the pieces one after the other, cut to length.
        whole = torch.cat([piece[start : start + slot] for piece in pieces])[: tensor.nbytes]
        yield name, whole.view(tensor.dtype).view(tensor.shape)
        start += slot


def _slot_bytes(tensor: DTensor, ranks: int) -> int:
    rows = tensor.shape[0]
    return -(-rows // ranks) * (tensor.nbytes // rows) if rows else 0


def _shard_group(tensor: DTensor) -> tuple[Any, int]:
    """The ranks that hold the first replica between them, or None for a rank of another replica."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    shard_dim: int | None = None
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            if shard_dim is not None or placement.dim != 0:
                raise NotImplementedError(f"only dimension 0 sharded over one mesh dimension: {tensor.placements}")
            shard_dim = dim
        elif coordinate is not None and coordinate[dim] != 0:
            return None, 0
    assert shard_dim is not None
    return mesh.get_group(shard_dim), mesh.size(shard_dim)
