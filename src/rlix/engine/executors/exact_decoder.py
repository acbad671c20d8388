"""Continuous batching whose results do not depend on the batch.

The bits of a matrix product depend on its shape: decoding a trajectory alone or beside others, or prefilling tokens
that were decoded elsewhere, would each round differently, and a sampled token would sooner or later flip. So every
forward here is a *tile* of single tokens, whatever they are (prompt, resumed prefix, next token, or padding), and both
the window a token attends over and the size of its tile are functions of the token's own position. What is computed for
a token then depends only on its own trajectory. That holds where a matrix kernel treats all rows of a product alike;
the tests check it to the bit on the CPU.
"""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rlix.engine import lora
from rlix.engine.executors.caches import BLOCK, SCRATCH, PagedCache
from rlix.engine.executors.decoder import STEP_TOKENS, Decoder, DecoderLimits, Drawn, Ints
from rlix.engine.inference.requests import GenerationRequest, GenerationResult

_FIRST_BLOCKS = 64
_FULL_TILE_WINDOW = 32
_LEAST_TILE = 16


class ExactDecoder(Decoder):
    """Args: tile_tokens: most tokens of one forward."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, limits: DecoderLimits, *, tile_tokens: int
    ) -> None:
        super().__init__(model, device, limits)
        self._tile_tokens = tile_tokens
        self._blocks = np.full((limits.max_rows, _window(limits.max_length - 1) // BLOCK), SCRATCH, dtype=np.int64)
        self._leader = np.full(
            limits.max_rows, -1, dtype=np.int64
        )  # the row that computes this row's prompt, until it has
        self._prompts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._cache: PagedCache = PagedCache(_FIRST_BLOCKS, device)
        self._free_blocks = list(range(_FIRST_BLOCKS - 1, SCRATCH, -1))

    @torch.inference_mode()
    def step(self, version: int) -> dict[int, GenerationResult]:
        (ready,) = np.nonzero(self._rows.active & (self._leader < 0))
        drawn = self._feed(ready)
        if len(led := self._share_prompts()):
            drawn += self._feed(led)  # they draw in the same step as who computed their prompt
        return self._append(drawn, version)

    def forget_prompts(self) -> None:
        self._prompts.clear()
        self._leader[:] = -1

    @torch.inference_mode()
    def warm_up(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        self._tile(none, none, BLOCK)

    def _feed(self, chosen: Ints) -> list[Drawn]:
        """Feed rows what they were not fed; what those draw that were fed all."""
        rows = self._rows
        fed_rows, counts = self._plan(chosen)
        token_rows = np.repeat(fed_rows, counts)
        offsets = np.arange(len(token_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = rows.fed[token_rows] + offsets
        windows = _windows(positions)
        drawn: list[Drawn] = []
        # Ascending windows: a token's keys are in the cache before a later token of its trajectory attends to them.
        # A tile is one adapter's: what is computed beside a token has no part in it, whatever the others' adapters are.
        adapters = rows.adapter[token_rows]
        for window, adapter in sorted(set(zip(windows.tolist(), adapters.tolist(), strict=True))):
            (tokens,) = np.nonzero((windows == window) & (adapters == adapter))
            self._use(adapter)
            size = self._tile_size(window)
            for first in range(0, len(tokens), size):
                tile = tokens[first : first + size]
                drawn += self._tile(token_rows[tile], positions[tile], window)
        rows.fed[fed_rows] += counts
        return drawn

    def _use(self, adapter: str) -> None:
        if self.adapter_versions:
            lora.use(self._model, adapter or None)

    def _plan(self, chosen: Ints) -> tuple[Ints, Ints]:
        """Which of these rows are fed how many tokens: those with one to feed first, then prompts, up to a bound."""
        counts = self._rows.length[chosen] - self._rows.fed[chosen]
        order = np.argsort(counts, kind="stable")
        budget = max(STEP_TOKENS, 2 * self._limits.max_rows)
        before = np.cumsum(counts[order]) - counts[order]
        take = np.clip(budget - before, 0, counts[order])
        some = take > 0
        return chosen[order][some], take[some]

    def _tile_size(self, window: int) -> int:
        """Tokens of a tile over `window` positions: fewer over long ones, where padding would cost most."""
        least = min(self._tile_tokens, _LEAST_TILE)
        return max(least, min(self._tile_tokens, self._tile_tokens * _FULL_TILE_WINDOW // window))

    def _tile(self, token_rows: Ints, positions: Ints, window: int) -> list[Drawn]:
        """One forward of at most a tile of tokens; rows whose last known token was among them draw the next."""
        rows, size, count = self._rows, self._tile_size(window), len(token_rows)
        ids, where, write = (np.zeros(size, dtype=np.int64) for _ in range(3))
        read = np.full((size, window // BLOCK), SCRATCH, dtype=np.int64)
        ids[:count] = rows.tokens[token_rows, positions]
        where[:count] = positions
        write[:count] = self._blocks[token_rows, positions // BLOCK] * BLOCK + positions % BLOCK
        read[:count] = self._blocks[token_rows, : window // BLOCK]
        self._cache.select(self._put(write), self._put(read))
        logits = self._logits(ids, self._put(where), window)
        (last,) = np.nonzero(positions == rows.length[token_rows] - 1)
        return [self._sample(token_rows[last], logits[self._put(last)])] if len(last) else []

    def _share_prompts(self) -> Ints:
        """Copy computed prompts to the rows that wait for them, all but the last token, whose logits each row needs.

        Returns which rows these are.
        """
        rows = self._rows
        (waiting,) = np.nonzero(rows.active & (self._leader >= 0))
        waiting = waiting[rows.fed[self._leader[waiting]] >= rows.prompt[waiting] - 1]
        for count in np.unique(_count(rows.prompt[waiting] - 1)):
            group = waiting[_count(rows.prompt[waiting] - 1) == count]
            source, target = self._blocks[self._leader[group], :count], self._blocks[group, :count]
            self._cache.copy(self._put(source.ravel()), self._put(target.ravel()))
        rows.fed[waiting] = rows.prompt[waiting] - 1
        self._leader[waiting] = -1
        return waiting

    # ---- the cache -------------------------------------------------------------------------------------------

    def _could_hold(self, length: int) -> bool:
        return bool(_count(length) <= self._max_blocks() - 1)

    def _reserve(self, length: int) -> bool:
        """Whether the blocks are free, after growing the cache towards its bound if need be."""
        blocks = _count(length)
        if len(self._free_blocks) < blocks:
            have = self._cache.blocks
            target = min(max(2 * have, have + blocks), self._max_blocks())
            if target > have:
                self._cache.grow(target)
                self._free_blocks += range(target - 1, have - 1, -1)
        return len(self._free_blocks) >= blocks

    def _place(self, row: int, request: GenerationRequest) -> None:
        count = _count(int(self._rows.limit[row]))
        self._blocks[row] = SCRATCH
        self._blocks[row, :count] = [self._free_blocks.pop() for _ in range(count)]
        # Samples of one prompt share its computation: the first row feeds it, the others copy the blocks.
        leader = self._prompts.setdefault((request.adapter, request.prompt_ids), row)
        self._leader[row] = leader if leader != row and len(request.prompt_ids) > 1 else -1

    def _vacate(self, row: int, request: GenerationRequest) -> None:
        self._leader[self._leader == row] = -1  # they feed the prompt themselves
        if self._prompts.get((request.adapter, request.prompt_ids)) == row:
            del self._prompts[request.adapter, request.prompt_ids]
        self._free_blocks += self._blocks[row, : _count(int(self._rows.limit[row]))].tolist()

    def _max_blocks(self) -> int:
        per_block = self._cache.bytes_per_block
        return max(self._cache.blocks, self._limits.kv_bytes // per_block) if per_block else self._cache.blocks


def _count(tokens: Any) -> Any:
    """Blocks that hold `tokens` positions (a number or an array)."""
    return -(-tokens // BLOCK)


def _window(position: int) -> int:
    """Positions a token at `position` attends over, masked beyond itself: the next power of two, at least a block."""
    return max(BLOCK, 1 << int(position).bit_length())


_WINDOWS = BLOCK << np.arange(32, dtype=np.int64)


def _windows(positions: Ints) -> Ints:
    """`_window` of each element."""
    windows: Ints = _WINDOWS[np.searchsorted(_WINDOWS, positions, side="right")]
    return windows
