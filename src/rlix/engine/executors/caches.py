"""Key-value caches as transformers' `Cache`: in blocks for single tokens, in lines for batched forwards."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

BLOCK = 16
"""Token positions per block."""

SCRATCH = 0
"""The block that padding writes to and reads from; never given to a trajectory."""

STRIDE = 32
"""Positions of a line are reserved and attended to in multiples of this."""


class PooledCache(Cache):
    """Keys and values of all trajectories, per layer, in a pool each.

    Layers and their shapes come from the first forward, so any model that calls `Cache.update` fits.
    """

    is_compileable = False

    def __init__(self, device: torch.device) -> None:
        self.layers: list[Any] = []  # what Cache's other methods look at; this cache has none of those
        self._device = device
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pools in self._pools.values() for pool in pools)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions are passed explicitly

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer not in self._pools:
            self._pools[layer] = (self._pool(keys), self._pool(values))
        return self._step(self._pools[layer][0], keys), self._step(self._pools[layer][1], values)

    @abstractmethod
    def _pool(self, states: Tensor) -> Tensor:
        """Of zeros, for keys or values such as these."""

    @abstractmethod
    def _step(self, pool: Tensor, states: Tensor) -> Tensor:
        """Keep these states; what is attended to."""


class PagedCache(PooledCache):
    """Blocks of `BLOCK` positions, for forwards that hold one token per batch row.

    Set `select` before each forward: where the row's token goes, and which positions it attends to.
    Source of the layout: Kwon et al., "Efficient memory management for large language model serving with
    PagedAttention", SOSP 2023.
    """

    def __init__(self, blocks: int, device: torch.device) -> None:
        super().__init__(device)
        self._blocks = blocks
        self._write = torch.zeros(0, dtype=torch.int64)
        self._read = self._write
        self._length = 0

    @property
    def blocks(self) -> int:
        return self._blocks

    @property
    def bytes_per_block(self) -> int:
        """0 until a forward has shown the shapes."""
        return self.nbytes // self._blocks

    def select(self, write: Tensor, read: Tensor) -> None:
        """Args: write (rows,) flat positions (block * BLOCK + offset); read (rows, n) blocks attended to."""
        self._write, self._read = write, read.reshape(-1)
        self._length = read.shape[1] * BLOCK

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

    def _pool(self, states: Tensor) -> Tensor:
        _, heads, _, dim = states.shape
        return torch.zeros(self._blocks, BLOCK, heads * dim, dtype=states.dtype, device=self._device)

    def _step(self, pool: Tensor, states: Tensor) -> Tensor:
        rows, heads, _, dim = states.shape
        pool.view(-1, heads * dim).index_copy_(0, self._write, states.reshape(rows, heads * dim))
        gathered = pool.index_select(0, self._read)
        return gathered.view(rows, self._length, heads, dim).transpose(1, 2)


class SlotCache(PooledCache):
    """Keys and values per layer, as (slots, heads, length, head_dim). Slots in use are the first ones.

    Call `prefill` or `decode` before each forward to say what it feeds. Contiguous lines cost memory beside paged ones
    (all slots are as long as the longest), but a decoding step reads them in place: nothing is gathered or copied.
    """

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        super().__init__(device)
        self._max_bytes = max_bytes
        self._slots, self._length = 1, STRIDE
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._positions: Tensor | None = None
        self._window = 0

    def fits(self, slots: int, length: int) -> bool:
        per_position = self.nbytes // (self._slots * self._length)
        return slots * _rounded(length) * per_position <= self._max_bytes

    def reserve(self, slots: int, length: int, used: int) -> bool:
        """Have room for `slots` lines of `length` positions, keeping the first `used` lines; False beyond the bound."""
        if slots <= self._slots and length <= self._length:
            return True
        generous = max(self._slots, 2 * slots if slots > self._slots else 0)
        kept = self._length if used else 0
        for new_slots, new_length in ((generous, max(self._length, length)), (slots, max(kept, length))):
            if self.fits(new_slots, new_length):
                self._resize(new_slots, _rounded(new_length), used)
                return True
        return False

    def prefill(self, slots: Tensor) -> None:
        """The next forward feeds (n, length) tokens from position 0 on; `slots` (n,) says where they go."""
        self._at, self._positions = slots, None

    def decode(self, positions: Tensor, window: int) -> None:
        """The next forward feeds one token to each of the first n slots, at `positions` (n,), all below `window`."""
        self._at = torch.arange(len(positions), device=self._device)
        self._positions, self._window = positions, min(_rounded(window), self._length)

    @property
    def window(self) -> int:
        return self._window

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of whole lines."""
        for pools in self._pools.values():
            for pool in pools:
                pool[:, :, :length].index_copy_(0, target, pool[:, :, :length].index_select(0, source))

    def _step(self, pool: Tensor, states: Tensor) -> Tensor:
        if self._positions is None:
            pool[:, :, : states.shape[2]].index_copy_(0, self._at, states)
            return states
        pool[self._at, :, self._positions] = states[:, :, 0]
        return pool[: len(self._at), :, : self._window]

    def _resize(self, slots: int, length: int, used: int) -> None:
        self._slots, self._length = slots, length
        for layer, pools in self._pools.items():
            keys, values = (self._pool(pool) for pool in pools)
            for new, old in zip((keys, values), pools, strict=True):
                new[:used, :, : old.shape[2]] = old[:used]
            self._pools[layer] = (keys, values)

    def _pool(self, states: Tensor) -> Tensor:
        """Zeros, not garbage: a masked position still takes part in a product, and 0 times NaN is NaN."""
        _, heads, _, dim = states.shape
        return torch.zeros(self._slots, heads, self._length, dim, dtype=states.dtype, device=self._device)


def _rounded(length: int) -> int:
    return -(-length // STRIDE) * STRIDE
