"""A key-value cache of one contiguous line per trajectory, as a transformers `Cache` for batched forwards."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

STRIDE = 32
"""Positions are reserved and attended to in multiples of this."""


class SlotCache(Cache):
    """Keys and values per layer, as (slots, heads, length, head_dim). Slots in use are the first ones.

    Call `prefill` or `decode` before each forward to say what it feeds. Contiguous lines cost memory beside paged ones
    (all slots are as long as the longest), but a decoding step reads them in place: nothing is gathered or copied.
    """

    is_compileable = False

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.layers: list[Any] = []  # what Cache's other methods look at; this cache has none of those
        self._device, self._max_bytes = device, max_bytes
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._slots, self._length = 1, STRIDE
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._positions: Tensor | None = None
        self._window = 0

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pools in self._pools.values() for pool in pools)

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

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer not in self._pools:
            self._pools[layer] = (self._pool(keys), self._pool(values))
        key_pool, value_pool = self._pools[layer]
        if self._positions is None:
            for pool, states in ((key_pool, keys), (value_pool, values)):
                pool[:, :, : states.shape[2]].index_copy_(0, self._at, states)
            return keys, values
        key_pool[self._at, :, self._positions] = keys[:, :, 0]
        value_pool[self._at, :, self._positions] = values[:, :, 0]
        rows = len(self._at)
        return key_pool[:rows, :, : self._window], value_pool[:rows, :, : self._window]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions are passed explicitly

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
