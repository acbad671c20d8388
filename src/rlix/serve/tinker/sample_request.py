"""A request for samples, read and checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlix.pipeline.ends import Ends
from rlix.pipeline.rollout.router import Sampling
from rlix.pipeline.seeds import stream_seed
from rlix.protocol.errors import SpecError
from rlix.serve.tinker.batches import Limits
from rlix.serve.tinker.given import section

_MOST_SAMPLES, _MOST_TOP = 1024, 100
_HIGHEST = 1e300


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for samples, checked.

    Attributes:
        strings: end an answer; so do the tokens of `sampling`.
        scores: whether the prompt's log-probabilities are wanted, of its last `last` tokens (None: all but the first).
        top_prompt, top_sample: how many of the most likely tokens are wanted at each position.
        targets: tokens to score at each position of the prompt after the first, [length - 1, k]; -1: none.
    """

    prompt: tuple[int, ...]
    count: int
    sampling: Sampling
    strings: tuple[str, ...]
    seed: int
    scores: bool
    last: int | None
    top_prompt: int
    top_sample: int
    targets: np.ndarray | None


def read_sample(body: bytes, operation: str, limits: Limits, ends: Ends) -> Asked:
    """Raises SpecError, naming the field."""
    given = json.loads(body)
    params = section(given, "sampling_params")
    prompt = _tokens(given.get("prompt"), limits)
    room = limits.context - len(prompt)
    wanted = params.get("max_tokens")
    if wanted is not None and not (_is_whole(wanted) and wanted > 0):
        raise SpecError(f"max_tokens is {wanted!r}; it must be a whole number above 0")
    if room < 1:
        raise SpecError(
            f"prompt: has {len(prompt):,} tokens, and the model's context is {limits.context:,} with the answer"
        )
    strings, token_ids = _stops(params.get("stop"), ends, limits)
    numbers = {"temperature": params.get("temperature", 1.0), "top_p": params.get("top_p", 1.0)}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not 0 <= value < _HIGHEST:
            raise SpecError(f"{name} is {value!r}; it must be a number from 0")
    if not 0 < numbers["top_p"] <= 1:
        raise SpecError(f"top_p is {numbers['top_p']!r}; it must be above 0 and at most 1")
    top_k = params.get("top_k", -1)
    if not _is_whole(top_k) or top_k < -1:
        raise SpecError(f"top_k is {top_k!r}; it must be -1 for all, or a whole number")
    seed = params.get("seed")
    if seed is not None and not _is_whole(seed):
        raise SpecError(f"seed is {seed!r}; it must be a whole number")
    count = _count(given, "num_samples", 1, _MOST_SAMPLES, default=1)
    last = given.get("prompt_logprobs_last_n")
    if last is not None and not (_is_whole(last) and 1 <= last < len(prompt) and given.get("prompt_logprobs")):
        raise SpecError("prompt_logprobs_last_n: from 1 to one less than the prompt has tokens, with prompt_logprobs")
    if given.get("prompt_alt_tokens_k"):
        raise SpecError("prompt_alt_tokens_k is refused: alternatives to a prompt's tokens are not drawn here")
    if given.get("record_stability_info"):
        raise SpecError("record_stability_info is refused: there is no stable_reinforce here to use it")
    return Asked(
        prompt=prompt,
        count=count,
        sampling=Sampling(
            max_new_tokens=min(room, wanted or room),
            temperature=float(numbers["temperature"]),
            top_p=float(numbers["top_p"]),
            top_k=max(top_k, 0),
            stop_token_ids=token_ids,
        ),
        strings=strings,
        seed=stream_seed("tinker", operation if seed is None else int(seed)),
        scores=bool(given.get("prompt_logprobs")),
        last=last,
        top_prompt=_count(given, "topk_prompt_logprobs", 0, _MOST_TOP, default=0),
        top_sample=_count(given, "topk_sample_logprobs", 0, _MOST_TOP, default=0),
        targets=_targets(given.get("target_prompt_logprobs"), len(prompt), limits),
    )


def _tokens(given: Any, limits: Limits) -> tuple[int, ...]:
    chunks = given.get("chunks") if isinstance(given, dict) else None
    if not isinstance(chunks, list) or not chunks:
        raise SpecError("prompt: must have chunks, and at least one token")
    ids: list[int] = []
    for chunk in chunks:
        tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(tokens, list):
            kind = chunk.get("type") if isinstance(chunk, dict) else None
            raise SpecError(f"prompt: only text is served, not {kind or 'such a chunk'}")
        ids += tokens
    _check_tokens("prompt", ids, limits)
    if not ids:
        raise SpecError("prompt: has no tokens")
    return tuple(ids)


def _check_tokens(where: str, ids: Sequence[Any], limits: Limits) -> None:
    wrong = [id for id in ids if not (_is_whole(id) and 0 <= id < limits.vocabulary)]
    if wrong:
        raise SpecError(f"{where}: {wrong[0]!r} is none of the model's {limits.vocabulary:,} tokens")


def _stops(given: Any, ends: Ends, limits: Limits) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Strings and tokens that end an answer. Of None the model's own; an empty list: nothing does."""
    if given is None:
        return (), ends.token_ids
    values = [given] if isinstance(given, str) else given
    kinds = {type(value) for value in values} if isinstance(values, list) else {None}
    if kinds - {str} and kinds - {int}:
        raise SpecError("stop: must be a text, texts, or the ids of tokens")
    if not values:
        return (), ()
    if isinstance(values[0], str):
        if not all(values):
            raise SpecError("stop: an empty text ends nothing; leave it out")
        return tuple(values), ends.token_ids
    _check_tokens("stop", values, limits)
    return (), tuple(dict.fromkeys((*ends.token_ids, *values)))


def _targets(given: Any, length: int, limits: Limits) -> np.ndarray | None:
    if given is None:
        return None
    try:
        shape = tuple(given["shape"])
        if given.get("sparse_crow_indices") is not None:
            raise SpecError("target_prompt_logprobs: send it dense, with -1 for nothing; sparse ones are not read")
        found = np.asarray(given["data"], np.int64).reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"target_prompt_logprobs: cannot be read: {error}") from error
    if found.ndim != 2 or found.shape[0] != length - 1 or not found.shape[1]:
        raise SpecError(f"target_prompt_logprobs: shape {list(shape)}; it must be [{length - 1}, k]")
    if int(found.max()) >= limits.vocabulary or int(found.min()) < -1:
        raise SpecError("target_prompt_logprobs: holds what is none of the model's tokens")
    return found


def _count(given: Mapping[str, Any], name: str, least: int, most: int, *, default: int) -> int:
    value = given.get(name, default)
    if value is None:
        return default
    if not _is_whole(value) or not least <= value <= most:
        raise SpecError(f"{name} is {value!r}; it must be a whole number from {least} to {most}")
    return int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
