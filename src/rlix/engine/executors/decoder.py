"""Continuous batching whose results do not depend on the batch.

The bits of a matrix product depend on its shape: decoding a trajectory alone or beside others, or prefilling tokens
that were decoded elsewhere, would each round differently, and a sampled token would sooner or later flip. So every
forward here is a *tile* of single tokens, whatever they are (prompt, resumed prefix, next token, or padding), and both
the window a token attends over and the size of its tile are functions of the token's own position. What is computed for
a token then depends only on its own trajectory. That holds where a matrix kernel treats all rows of a product alike;
the tests check it to the bit on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlix.engine.executors.paged_cache import BLOCK, SCRATCH, PagedCache
from rlix.engine.requests import GenerationRequest, GenerationResult
from rlix.engine.sampling import sample

Ints = npt.NDArray[np.int64]

_STEP_TOKENS = 2048  # tokens fed per step: bounds how long an abort waits behind prompts
_FIRST_BLOCKS = 64
_FULL_TILE_WINDOW = 32
_LEAST_TILE = 16


@dataclass(frozen=True, slots=True)
class DecoderLimits:
    """`max_length` counts a trajectory's tokens, prompt included; `kv_bytes` bounds the cache."""

    tile_tokens: int
    max_rows: int
    max_length: int
    kv_bytes: int

    def tile(self, window: int) -> int:
        """Tokens of a tile over `window` positions: fewer over long ones, where padding would cost most."""
        least = min(self.tile_tokens, _LEAST_TILE)
        return max(least, min(self.tile_tokens, self.tile_tokens * _FULL_TILE_WINDOW // window))


class _Rows:
    """The trajectories being decoded, one array element each."""

    def __init__(self, limits: DecoderLimits) -> None:
        n = limits.max_rows
        self.active = np.zeros(n, dtype=bool)
        self.prompt, self.start, self.limit = (np.zeros(n, dtype=np.int64) for _ in range(3))
        self.length = np.zeros(n, dtype=np.int64)  # tokens known
        self.fed = np.zeros(n, dtype=np.int64)  # tokens whose keys and values are in the cache
        self.leader = np.full(n, -1, dtype=np.int64)  # the row that computes this row's prompt, until it has
        self.seed, self.top_k = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self.temperature, self.top_p = np.zeros(n), np.zeros(n)
        self.tokens = np.zeros((n, 64), dtype=np.int64)
        self.logprobs = np.zeros((n, 64), dtype=np.float32)
        self.versions = np.zeros((n, 64), dtype=np.int64)
        self.stops = np.full((n, 4), -1, dtype=np.int64)
        self.blocks = np.full((n, _window(limits.max_length - 1) // BLOCK), SCRATCH, dtype=np.int64)

    def widen(self, length: int, stops: int) -> None:
        if length > self.tokens.shape[1]:
            extra = ((0, 0), (0, max(length, 2 * self.tokens.shape[1]) - self.tokens.shape[1]))
            self.tokens = np.pad(self.tokens, extra)
            self.logprobs = np.pad(self.logprobs, extra)
            self.versions = np.pad(self.versions, extra)
        if stops > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, stops - self.stops.shape[1])), constant_values=-1)


class Decoder:
    """Decodes trajectories, one token each per step, on one model. Not thread-safe: one thread owns it.

    Args:
        model: a causal LM whose attention layers all attend to the whole prefix and use the cache they are given.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, limits: DecoderLimits) -> None:
        self._model, self._device, self._limits = model, device, limits
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._rows = _Rows(limits)
        self._requests: dict[int, GenerationRequest] = {}
        self._prompts: dict[tuple[int, ...], int] = {}
        self._cache = PagedCache(_FIRST_BLOCKS, device)
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self._free_blocks = list(range(_FIRST_BLOCKS - 1, SCRATCH, -1))
        self._arange = torch.arange(_window(limits.max_length - 1), device=device)

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError when the request could never be decoded."""
        known = request.prompt_ids + request.generated_ids
        for token in (min(known), max(known)):
            if not 0 <= token < self._vocabulary:
                raise ValueError(f"request {request.id!r}: token {token} is not in 0..{self._vocabulary - 1}")
        length = len(request.prompt_ids) + request.max_new_tokens
        if length > self._limits.max_length:
            raise ValueError(
                f"request {request.id!r}: {len(request.prompt_ids)} prompt tokens and max_new_tokens="
                f"{request.max_new_tokens} exceed max_model_len={self._limits.max_length}"
            )
        if _blocks(length) > self._max_blocks() - 1:
            raise ValueError(
                f"request {request.id!r}: {length} tokens do not fit a KV cache of {self._limits.kv_bytes} bytes; "
                "raise kv_cache_bytes or lower max_new_tokens"
            )

    def admit(self, request: GenerationRequest) -> int | None:
        """Give the request a row, or None while there is no room for it."""
        length = len(request.prompt_ids) + request.max_new_tokens
        if not self._free_rows or not self._reserve(_blocks(length)):
            return None
        rows, row = self._rows, self._free_rows.pop()
        known = request.prompt_ids + request.generated_ids
        rows.widen(length, len(request.stop_token_ids))
        rows.blocks[row] = SCRATCH
        rows.blocks[row, : _blocks(length)] = [self._free_blocks.pop() for _ in range(_blocks(length))]
        rows.tokens[row, : len(known)] = known
        rows.prompt[row], rows.start[row], rows.length[row] = len(request.prompt_ids), len(known), len(known)
        rows.limit[row], rows.fed[row] = length, 0
        rows.seed[row], rows.temperature[row] = request.seed, request.temperature
        rows.top_p[row], rows.top_k[row] = request.top_p, request.top_k
        rows.stops[row] = -1
        rows.stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
        # Samples of one prompt share its computation: the first row feeds it, the others copy the blocks.
        leader = self._prompts.setdefault(request.prompt_ids, row)
        rows.leader[row] = leader if leader != row and len(request.prompt_ids) > 1 else -1
        rows.active[row] = True
        self._requests[row] = request
        return row

    @torch.inference_mode()
    def step(self, version: int) -> dict[int, GenerationResult]:
        """Feed every row what it has not been fed and draw its next token; the results of rows that ended."""
        rows = self._rows
        fed_rows, counts = self._plan()
        token_rows = np.repeat(fed_rows, counts)
        offsets = np.arange(len(token_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = rows.fed[token_rows] + offsets
        windows = _windows(positions)
        drawn: list[tuple[Ints, Tensor, Tensor]] = []
        # Ascending windows: a token's keys are in the cache before a later token of its trajectory attends to them.
        for window in np.unique(windows):
            (chosen,) = np.nonzero(windows == window)
            size = self._limits.tile(int(window))
            for first in range(0, len(chosen), size):
                tile = chosen[first : first + size]
                drawn += self._tile(token_rows[tile], positions[tile], int(window))
        rows.fed[fed_rows] += counts
        self._share_prompts()
        return self._append(drawn, version)

    def release(self, row: int, finish_reason: str, version: int) -> GenerationResult:
        """End a row with the tokens it has."""
        rows, request = self._rows, self._requests.pop(row)
        new = slice(int(rows.start[row]), int(rows.length[row]))
        versions = tuple(rows.versions[row, new].tolist())
        result = GenerationResult(
            id=request.id,
            token_ids=tuple(rows.tokens[row, new].tolist()),
            logprobs=tuple(rows.logprobs[row, new].tolist()),
            finished=finish_reason != "abort",
            finish_reason=finish_reason,
            weight_version=versions[-1] if versions else version,
            versions=versions,
        )
        rows.active[row] = False
        rows.leader[rows.leader == row] = -1  # they feed the prompt themselves
        if self._prompts.get(request.prompt_ids) == row:
            del self._prompts[request.prompt_ids]
        self._free_blocks += rows.blocks[row, : _blocks(int(rows.limit[row]))].tolist()
        self._free_rows.append(row)
        return result

    def forget_prompts(self) -> None:
        """After new weights: nobody may reuse what the old ones computed for a prompt."""
        self._prompts.clear()
        self._rows.leader[:] = -1

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One forward of padding; shows the cache its shapes."""
        none = np.zeros(0, dtype=np.int64)
        self._tile(none, none, BLOCK)

    def _plan(self) -> tuple[Ints, Ints]:
        """Which rows are fed how many tokens: those with one to feed first, then prompts, up to a bound per step."""
        rows = self._rows
        (ready,) = np.nonzero(rows.active & (rows.leader < 0))
        counts = rows.length[ready] - rows.fed[ready]
        order = np.argsort(counts, kind="stable")
        budget = max(_STEP_TOKENS, 2 * self._limits.max_rows)
        before = np.cumsum(counts[order]) - counts[order]
        take = np.clip(budget - before, 0, counts[order])
        some = take > 0
        return ready[order][some], take[some]

    def _tile(self, token_rows: Ints, positions: Ints, window: int) -> list[tuple[Ints, Tensor, Tensor]]:
        """One forward of at most a tile of tokens; rows whose last known token was among them draw the next."""
        rows, size, count = self._rows, self._limits.tile(window), len(token_rows)
        ids, where, write = (np.zeros(size, dtype=np.int64) for _ in range(3))
        read = np.full((size, window // BLOCK), SCRATCH, dtype=np.int64)
        ids[:count] = rows.tokens[token_rows, positions]
        where[:count] = positions
        write[:count] = rows.blocks[token_rows, positions // BLOCK] * BLOCK + positions % BLOCK
        read[:count] = rows.blocks[token_rows, : window // BLOCK]
        position = self._put(where)
        self._cache.select(self._put(write), self._put(read))
        logits: Tensor = self._model(
            input_ids=self._put(ids)[:, None],
            position_ids=position[:, None],
            attention_mask=(self._arange[:window] <= position[:, None])[:, None, None, :],
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        (last,) = np.nonzero(positions == rows.length[token_rows] - 1)
        if not len(last):
            return []
        chosen = token_rows[last]
        tokens, logprobs = sample(
            logits[self._put(last), 0],
            self._put(rows.seed[chosen]),
            self._put(rows.length[chosen] - rows.prompt[chosen]),
            self._put(rows.temperature[chosen]),
            self._put(rows.top_p[chosen]),
            self._put(rows.top_k[chosen]),
        )
        return [(chosen, tokens, logprobs)]

    def _share_prompts(self) -> None:
        """Copy computed prompts to the rows that wait for them; all but the last token, whose logits each row needs."""
        rows = self._rows
        (waiting,) = np.nonzero(rows.active & (rows.leader >= 0))
        waiting = waiting[rows.fed[rows.leader[waiting]] >= rows.prompt[waiting] - 1]
        for count in np.unique(_blocks(rows.prompt[waiting] - 1)):
            group = waiting[_blocks(rows.prompt[waiting] - 1) == count]
            source, target = rows.blocks[rows.leader[group], :count], rows.blocks[group, :count]
            self._cache.copy(self._put(source.ravel()), self._put(target.ravel()))
        rows.fed[waiting] = rows.prompt[waiting] - 1
        rows.leader[waiting] = -1

    def _append(self, drawn: Sequence[tuple[Ints, Tensor, Tensor]], version: int) -> dict[int, GenerationResult]:
        if not drawn:
            return {}
        rows = self._rows
        chosen = np.concatenate([piece[0] for piece in drawn])
        tokens = torch.cat([piece[1] for piece in drawn]).cpu().numpy()
        end = rows.length[chosen]
        rows.tokens[chosen, end] = tokens
        rows.logprobs[chosen, end] = torch.cat([piece[2] for piece in drawn]).cpu().numpy()
        rows.versions[chosen, end] = version
        rows.length[chosen] += 1
        stopped = (rows.stops[chosen] == tokens[:, None]).any(axis=1)
        ended = stopped | (rows.length[chosen] >= rows.limit[chosen])
        return {
            int(row): self.release(int(row), "stop" if stop else "length", version)
            for row, stop in zip(chosen[ended], stopped[ended], strict=True)
        }

    def _reserve(self, blocks: int) -> bool:
        """Whether `blocks` are free, after growing the cache towards its bound if need be."""
        if len(self._free_blocks) < blocks:
            have = self._cache.blocks
            target = min(max(2 * have, have + blocks), self._max_blocks())
            if target > have:
                self._cache.grow(target)
                self._free_blocks += range(target - 1, have - 1, -1)
        return len(self._free_blocks) >= blocks

    def _max_blocks(self) -> int:
        per_block = self._cache.bytes_per_block
        return max(self._cache.blocks, self._limits.kv_bytes // per_block) if per_block else self._cache.blocks

    def _put(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _blocks(tokens: Any) -> Any:
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
