"""Continuous batching: what every decoder of the transformers executor keeps of the trajectories it works on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlix.engine.executors.caches import STRIDE, PooledCache
from rlix.engine.inference.requests import GenerationRequest, GenerationResult
from rlix.engine.inference.sampling import sample

Ints = npt.NDArray[np.int64]

STEP_TOKENS = 2048
"""Prompt tokens fed per step: bounds how long an abort waits behind prompts."""


@dataclass(frozen=True, slots=True)
class DecoderLimits:
    """`max_length` counts a trajectory's tokens, prompt included; `kv_bytes` bounds the cache."""

    max_rows: int
    max_length: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of each of `rows`: (n,) tokens int64 and log-probabilities float32, on the device."""

    rows: Ints
    tokens: Tensor
    logprobs: Tensor


class Rows:
    """The trajectories being decoded, one array element each."""

    def __init__(self, count: int) -> None:
        self.adapter = np.zeros(count, dtype=object)  # its name; "": none
        self.active = np.zeros(count, dtype=bool)
        self.prompt, self.start, self.limit = (np.zeros(count, dtype=np.int64) for _ in range(3))
        self.length = np.zeros(count, dtype=np.int64)  # tokens known
        self.fed = np.zeros(count, dtype=np.int64)  # tokens whose keys and values are in the cache
        self.seed, self.top_k = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self.temperature, self.top_p = np.zeros(count), np.zeros(count)
        self.tokens = np.zeros((count, 64), dtype=np.int64)
        self.logprobs = np.zeros((count, 64), dtype=np.float32)
        self.versions = np.zeros((count, 64), dtype=np.int64)
        self.stops = np.full((count, 4), -1, dtype=np.int64)

    def put(self, row: int, request: GenerationRequest) -> None:
        known = request.prompt_ids + request.generated_ids
        self._widen(len(request.prompt_ids) + request.max_new_tokens, len(request.stop_token_ids))
        self.tokens[row, : len(known)] = known
        self.prompt[row], self.start[row], self.length[row] = len(request.prompt_ids), len(known), len(known)
        self.limit[row], self.fed[row] = len(request.prompt_ids) + request.max_new_tokens, 0
        self.seed[row], self.temperature[row] = request.seed, request.temperature
        self.top_p[row], self.top_k[row] = request.top_p, request.top_k
        self.adapter[row] = request.adapter
        self.stops[row] = -1
        self.stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
        self.active[row] = True

    def _widen(self, length: int, stops: int) -> None:
        if length > self.tokens.shape[1]:
            extra = ((0, 0), (0, max(length, 2 * self.tokens.shape[1]) - self.tokens.shape[1]))
            self.tokens = np.pad(self.tokens, extra)
            self.logprobs = np.pad(self.logprobs, extra)
            self.versions = np.pad(self.versions, extra)
        if stops > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, stops - self.stops.shape[1])), constant_values=-1)


class Decoder(ABC):
    """Decodes trajectories on one model, one token each per step. Not thread-safe: one thread owns it.

    Args:
        model: a causal LM whose attention layers all attend to the whole prefix and use the cache they are given.
    """

    _cache: PooledCache

    def __init__(self, model: PreTrainedModel, device: torch.device, limits: DecoderLimits) -> None:
        self._model, self._device, self._limits = model, device, limits
        self._arange = torch.arange(2 * max(limits.max_length, STRIDE), device=device)  # as far as any window reaches
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._rows = Rows(limits.max_rows)
        self._requests: dict[int, GenerationRequest] = {}
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self.adapter_versions: Mapping[str, int] = {}
        """Of the adapters that there are: label the tokens of their requests."""

    # ---- what a decoder does ---------------------------------------------------------------------------------

    @abstractmethod
    def step(self, version: int) -> dict[int, GenerationResult]:
        """Feed what was not fed, draw next tokens; the results of rows that ended. `version` labels the tokens of
        requests without an adapter."""

    @abstractmethod
    def warm_up(self) -> None:
        """A forward that shows the cache its shapes."""

    @abstractmethod
    def forget_prompts(self) -> None:
        """After new weights: nobody may reuse what the old ones computed for a prompt."""

    @abstractmethod
    def _could_hold(self, length: int) -> bool:
        """Whether an empty cache has room for one trajectory of `length` tokens."""

    @abstractmethod
    def _reserve(self, length: int) -> bool:
        """Make room in the cache for one more trajectory of `length` tokens; False while there is none."""

    @abstractmethod
    def _place(self, row: int, request: GenerationRequest) -> None:
        """Take the room that was reserved."""

    @abstractmethod
    def _vacate(self, row: int, request: GenerationRequest) -> None:
        """Give a row's room back."""

    # ---- the same for all ------------------------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError when the request could never be decoded."""
        if request.adapter and request.adapter not in self.adapter_versions:
            raise ValueError(
                f"request {request.id!r}: there is no adapter {request.adapter!r}; there are "
                f"{sorted(self.adapter_versions)}"
            )
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
        if not self._could_hold(length):
            raise ValueError(
                f"request {request.id!r}: {length} tokens do not fit a KV cache of {self._limits.kv_bytes} bytes; "
                "raise kv_cache_bytes or lower max_new_tokens"
            )

    def admit(self, request: GenerationRequest) -> int | None:
        """Give the request a row, or None while there is no room for it."""
        if not self._free_rows or not self._reserve(len(request.prompt_ids) + request.max_new_tokens):
            return None
        row = self._free_rows.pop()
        self._rows.put(row, request)
        self._requests[row] = request
        self._place(row, request)
        return row

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
        self._vacate(row, request)
        self._free_rows.append(row)
        return result

    def drawn(self, row: int, since: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, their log-probabilities and versions, that a row has drawn after its first `since` ones."""
        rows, new = self._rows, slice(int(self._rows.start[row]) + since, int(self._rows.length[row]))
        return rows.tokens[row, new].tolist(), rows.logprobs[row, new].tolist(), rows.versions[row, new].tolist()

    def _logits(self, tokens: Ints, positions: Tensor, window: int) -> Tensor:
        """Of one token each of several rows, (rows, vocabulary); the cache knows which rows these are."""
        logits: Tensor = self._model(
            input_ids=self._put(tokens)[:, None],
            position_ids=positions[:, None],
            attention_mask=(self._arange[:window] <= positions[:, None])[:, None, None, :],
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        return logits[:, 0]

    def _sample(self, rows: Ints, logits: Tensor) -> Drawn:
        """Draw the next token of `rows` from logits (rows, vocabulary)."""
        state = self._rows
        tokens, logprobs = sample(
            logits,
            self._put(state.seed[rows]),
            self._put(state.length[rows] - state.prompt[rows]),
            self._put(state.temperature[rows]),
            self._put(state.top_p[rows]),
            self._put(state.top_k[rows]),
        )
        return Drawn(rows, tokens, logprobs)

    def _append(self, drawn: Sequence[Drawn], version: int) -> dict[int, GenerationResult]:
        """Note the drawn tokens and end the rows that are through."""
        if not drawn:
            return {}
        rows = self._rows
        chosen = np.concatenate([piece.rows for piece in drawn])
        tokens = torch.cat([piece.tokens for piece in drawn]).cpu().numpy()
        end = rows.length[chosen]
        rows.tokens[chosen, end] = tokens
        rows.logprobs[chosen, end] = torch.cat([piece.logprobs for piece in drawn]).cpu().numpy()
        rows.versions[chosen, end] = [self.adapter_versions.get(name, version) for name in rows.adapter[chosen]]
        rows.length[chosen] += 1
        stopped = (rows.stops[chosen] == tokens[:, None]).any(axis=1)
        ended = stopped | (rows.length[chosen] >= rows.limit[chosen])
        return {
            int(row): self.release(int(row), "stop" if stop else "length", version)
            for row, stop in zip(chosen[ended], stopped[ended], strict=True)
        }

    def _put(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
