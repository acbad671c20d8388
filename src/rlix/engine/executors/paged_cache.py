"""A key-value cache in blocks, as a transformers `Cache` for forwards that hold one token per batch row."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

BLOCK = 16
"""Token positions per block."""

SCRATCH = 0
"""The block that padding writes to and reads from; never given to a trajectory."""


class PagedCache(Cache):
    """Keys and values of all trajectories of a replica, per layer, in a pool of blocks of `BLOCK` positions.

    Set `select` before each forward: where the row's token goes, and which positions it attends to. Layers and their
    shapes come from the first forward, so any model that calls `Cache.update` with (rows, heads, 1, head_dim) fits.
    Source of the layout: Kwon et al., "Efficient memory management for large language model serving with
    PagedAttention", SOSP 2023.
    """

    is_compileable = False

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.layers: list[Any] = []  # what Cache's other methods look at; this cache has none of those
        self._device = device
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._blocks = blocks
        self._write = torch.zeros(0, dtype=torch.int64)
        self._read = self._write
        self._length = 0

    @property
    def blocks(self) -> int:
        return self._blocks

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pools in self._pools.values() for pool in pools)

    @property
    def bytes_per_block(self) -> int:
        """0 until a forward has shown the shapes."""
        return self.nbytes // self._blocks

    def select(self, write: Tensor, read: Tensor) -> None:
        """Args: write (rows,) flat positions (block * BLOCK + offset); read (rows, n) blocks attended to."""
        self._write, self._read = write, read.reshape(-1)
        self._length = read.shape[1] * BLOCK

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer not in self._pools:
            self._pools[layer] = (self._pool(keys), self._pool(values))
        return self._step(self._pools[layer][0], keys), self._step(self._pools[layer][1], values)

    def grow(self, blocks: int) -> None:
        """Enlarge the pool to `blocks`; contents stay."""
        extra = blocks - self._blocks
        for layer, pools in self._pools.items():
            keys, values = (torch.cat([pool, pool.new_zeros(extra, *pool.shape[1:])]) for pool in pools)
            self._pools[layer] = (keys, values)
        self._blocks = blocks

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks."""
        for pools in self._pools.values():
            for pool in pools:
                pool.index_copy_(0, target, pool.index_select(0, source))

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions are passed explicitly

    def _pool(self, states: Tensor) -> Tensor:
        _, heads, _, dim = states.shape
        return torch.zeros(self._blocks, BLOCK, heads * dim, dtype=states.dtype, device=self._device)

    def _step(self, pool: Tensor, states: Tensor) -> Tensor:
        rows, heads, _, dim = states.shape
        pool.view(-1, heads * dim).index_copy_(0, self._write, states.reshape(rows, heads * dim))
        gathered = pool.index_select(0, self._read)
        return gathered.view(rows, self._length, heads, dim).transpose(1, 2)
