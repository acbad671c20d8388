"""Continuous batching for speed: ordinary batched prefill and decoding with a KV cache.

Every step is one forward over all trajectories that are being decoded, whatever their lengths. Which token a
trajectory draws is decided by its own random stream, but the probabilities behind the draw are rounded as the shape of
the batch has it: a trajectory is reproduced when it is batched as before, else up to rounding.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from rlix.engine import lora
from rlix.engine.executors.caches import SlotCache
from rlix.engine.executors.decoder import STEP_TOKENS, Decoder, DecoderLimits, Ints
from rlix.engine.inference.requests import GenerationRequest, GenerationResult

_PADDING_LIMIT = 16  # positions a prompt may be padded by for free; beyond, at most to twice its length


class BatchedDecoder(Decoder):
    """A trajectory's line in the cache is its slot; slots 0..n-1 are in use when a step starts."""

    def __init__(self, model: PreTrainedModel, device: torch.device, limits: DecoderLimits) -> None:
        super().__init__(model, device, limits)
        self._cache: SlotCache = SlotCache(device, limits.kv_bytes)
        self._row_at: list[int] = []  # by slot; -1 where a row has ended since the last step

    @torch.inference_mode()
    def step(self, version: int) -> dict[int, GenerationResult]:
        self._compact()
        if self._prefill():
            return {}
        rows = np.asarray(self._row_at, dtype=np.int64)
        state = self._rows
        last = state.length[rows] - 1
        positions = self._put(last)
        self._cache.decode(positions, int(last.max()) + 1)
        with lora.row_by_row(self._model, state.adapter[rows].tolist()):
            logits = self._logits(state.tokens[rows, last], positions, self._cache.window)
        state.fed[rows] += 1
        return self._append([self._sample(rows, logits)], version)

    @torch.inference_mode()
    def warm_up(self) -> None:
        self._feed(np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64), [""])

    def forget_prompts(self) -> None:
        """Prompts are shared only by rows that start in one step, between which weights do not change."""

    def _prefill(self) -> bool:
        """Feed one batch of what new rows know, but for the last token: decoding feeds it, for its logits.

        Returns whether any row still waits for such a batch.
        """
        state = self._rows
        slots = {row: slot for slot, row in enumerate(self._row_at)}
        groups: dict[tuple[str, bytes], list[int]] = {}  # samples of one prompt, computed once
        for row in self._row_at:
            if state.fed[row] < state.length[row] - 1:
                known = state.tokens[row, : state.length[row] - 1].tobytes()
                groups.setdefault((state.adapter[row], known), []).append(row)
        if not groups:
            return False
        waiting = sorted(groups.values(), key=lambda rows: int(state.length[rows[0]]))
        batch = self._batch(waiting)
        leaders = np.asarray([rows[0] for rows in batch])
        length = int(state.length[leaders].max()) - 1
        ids = np.where(np.arange(length) < state.length[leaders, None] - 1, state.tokens[leaders, :length], 0)
        self._feed(ids, np.asarray([slots[row] for row in leaders.tolist()]), state.adapter[leaders].tolist())
        copies = [(slots[rows[0]], slots[row]) for rows in batch for row in rows[1:]]
        if copies:
            source, target = np.asarray(copies).T
            self._cache.copy(self._put(source), self._put(target), length)
        fed = [row for rows in batch for row in rows]
        state.fed[fed] = state.length[fed] - 1
        return len(batch) < len(waiting)

    def _batch(self, waiting: list[list[int]]) -> list[list[int]]:
        """The first of `waiting`, ordered by length, that go well into one forward."""
        lengths = [int(self._rows.length[rows[0]]) - 1 for rows in waiting]
        longest = max(2 * lengths[0], lengths[0] + _PADDING_LIMIT)
        count = 1
        while count < len(waiting) and lengths[count] <= longest and (count + 1) * lengths[count] <= STEP_TOKENS:
            count += 1
        return waiting[:count]

    def _feed(self, ids: Ints, slots: Ints, adapters: list[str]) -> None:
        """Compute keys and values of (n, length) tokens. Padding is on the right, where no token attends to it."""
        length = ids.shape[1]
        where = self._arange[:length]
        self._cache.prefill(self._put(slots))
        with lora.row_by_row(self._model, adapters):
            self._model.base_model(
                input_ids=self._put(ids),
                position_ids=where.expand(len(ids), -1),
                attention_mask=(where <= where[:, None])[None, None],
                past_key_values=self._cache,
                use_cache=True,
            )

    # ---- the cache -------------------------------------------------------------------------------------------

    def _could_hold(self, length: int) -> bool:
        return self._cache.fits(1, length)

    def _reserve(self, length: int) -> bool:
        self._compact()
        return self._cache.reserve(len(self._row_at) + 1, length, used=len(self._row_at))

    def _place(self, row: int, request: GenerationRequest) -> None:
        self._row_at.append(row)

    def _vacate(self, row: int, request: GenerationRequest) -> None:
        self._row_at[self._row_at.index(row)] = -1

    def _compact(self) -> None:
        """Move the last rows into the slots of those that ended."""
        if -1 not in self._row_at:
            return
        count = sum(row >= 0 for row in self._row_at)
        holes = [slot for slot in range(count) if self._row_at[slot] < 0]
        moved = [slot for slot in range(count, len(self._row_at)) if self._row_at[slot] >= 0]
        if moved:
            length = int(self._rows.length[[self._row_at[slot] for slot in moved]].max())
            self._cache.copy(self._put(np.asarray(moved)), self._put(np.asarray(holes)), length)
        for hole, slot in zip(holes, moved, strict=True):
            self._row_at[hole] = self._row_at[slot]
        del self._row_at[count:]
