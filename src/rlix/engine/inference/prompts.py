"""From what a user calls `generate` with to requests, and from results back to text."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlix.engine.inference.requests import (
    CompletionOutput,
    GenerationRequest,
    GenerationResult,
    RequestOutput,
    SamplingParams,
)
from rlix.engine.model_source import ModelSource

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any] | None


class PromptReader:
    """Checks and tokenizes prompts for one model.

    Args:
        max_model_len: most tokens of prompt and answer together; None: what the configuration says.
        seed: with the number of prompts read before, the key of the stream of a prompt without a seed.
    """

    def __init__(self, source: ModelSource, max_model_len: int | None, seed: int) -> None:
        config = source.load_config()
        self._source, self._seed = source, seed
        self._vocabulary = int(config.vocab_size)
        self._max_length = max_model_len or int(getattr(config, "max_position_embeddings", 2048))
        self._eos = source.eos_token_ids()
        self._tokenizer = source.tokenizer()
        self._numbers = itertools.count()

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params],
        ids: Sequence[str] | None,
    ) -> list[GenerationRequest]:
        """Raises ValueError naming the index of a prompt that makes no sense."""
        each = _as_prompts(prompts)
        all_params = _as_params(params, len(each))
        if ids is not None and (len(ids) != len(each) or len(set(ids)) != len(ids)):
            raise ValueError(f"request_ids must be {len(each)} different names, one per prompt; got {list(ids)}")
        shared = isinstance(params, SamplingParams | Mapping)
        made: list[GenerationRequest] = []
        for index, (prompt, values) in enumerate(zip(each, all_params, strict=True)):
            number = next(self._numbers)
            try:
                request = self._request(ids[index] if ids else f"request-{number}", number, prompt, values)
                # One seed for all: samples of one prompt are not to be the same sample. The first is that of the seed.
                own = index if shared and SamplingParams.of(values).seed is not None else 0
                made.append(replace(request, seed=stream_key(request.seed, own)) if own else request)
            except (TypeError, ValueError) as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return made

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._max_length

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens without special ones; empty where the model has no tokenizer."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def output(self, request: GenerationRequest, result: GenerationResult) -> RequestOutput:
        answer = CompletionOutput(
            index=0,
            text=self.decode(result.token_ids),
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            finish_reason=result.finish_reason,
            weight_version=result.weight_version,
            generated=(True,) * len(result.token_ids),
        )
        return RequestOutput(request.id, request.prompt_ids, (answer,))

    def _request(self, request_id: str, number: int, prompt: Prompt, values: Params) -> GenerationRequest:
        params = SamplingParams.of(values)
        token_ids = self.tokens(prompt)
        if len(token_ids) + params.max_new_tokens > self._max_length:
            raise ValueError(
                f"{len(token_ids)} prompt tokens and max_new_tokens={params.max_new_tokens} exceed "
                f"max_model_len={self._max_length}"
            )
        return GenerationRequest(
            id=request_id,
            prompt_ids=token_ids,
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=tuple({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}),
            seed=stream_key(self._seed, number) if params.seed is None else params.seed,
        )

    def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Raises TypeError for what is no prompt, ValueError for text without a tokenizer and for unknown tokens."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("it is text, but the model has no tokenizer: give token ids")
            prompt = self._tokenizer(prompt)["input_ids"]
        if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
            raise TypeError(f"a prompt is a text or token ids, not {type(prompt).__name__}")
        token_ids: tuple[Any, ...] = tuple(_plain(prompt))
        for token in token_ids:
            if not isinstance(token, int) or not 0 <= token < self._vocabulary:
                raise ValueError(f"token {token!r} is not an id in 0..{self._vocabulary - 1}")
        return token_ids


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a text or a sequence of ints; anything else is a sequence of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts are texts or token ids, one or several, not {type(prompts).__name__}")
    each: list[Any] = [_plain(prompt) for prompt in prompts]
    if not each:
        raise ValueError("no prompts")
    return [each] if all(isinstance(token, int) for token in each) else each


def _plain(value: Any) -> Any:
    """Tensors and arrays of token ids as lists of ints."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_params(params: Params | Sequence[Params], count: int) -> list[Params]:
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    given: Any = params
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"sampling_params are a dictionary for all prompts, or a list of them, not {given!r}")
    each = list(given)
    if len(each) != count:
        raise ValueError(f"{len(each)} sampling_params for {count} prompts: give one for all, or one for each")
    return each


def stream_key(seed: int, number: int) -> int:
    """The key of the `number`-th random stream below `seed`."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
