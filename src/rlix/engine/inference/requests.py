"""What goes into and comes out of generation, for callers of an engine and for the replicas behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one prompt is answered.

    Attributes:
        max_new_tokens: upper bound on generated tokens; `max_tokens` is accepted as another name for it in a mapping.
        temperature: divides the logits; 0 means greedy.
        top_p: keep the smallest set of most likely tokens whose probability reaches `top_p`; 1 keeps all.
        top_k: keep the `top_k` most likely tokens; 0 (or -1, as vLLM spells it) keeps all.
        stop_token_ids: generation ends after one of these; the stop token is part of the answer.
        ignore_eos: do not end at the model's own end-of-sequence token.
        seed: key of this prompt's random stream; None lets the engine derive one.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check_sampling(self)

    @classmethod
    def of(cls, params: "SamplingParams | Mapping[str, Any] | None") -> "SamplingParams":
        """Parameters from a mapping, with `max_tokens` allowed. Raises ValueError naming an unknown key."""
        if params is None:
            return cls()
        if isinstance(params, SamplingParams):
            return params
        values = dict(params)
        if "max_tokens" in values:
            if "max_new_tokens" in values:
                raise ValueError("sampling_params has both max_tokens and max_new_tokens: give one of them")
            values["max_new_tokens"] = values.pop("max_tokens")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"sampling_params has unknown keys {unknown}; known: {sorted(known | {'max_tokens'})}")
        if values.get("top_k") == -1:
            values["top_k"] = 0
        stops = values.get("stop_token_ids") or ()
        values["stop_token_ids"] = (stops,) if isinstance(stops, Integral) else tuple(stops)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One trajectory to generate, or to go on with.

    Attributes:
        generated_ids: tokens it already has (kept when it was preempted); they count towards `max_new_tokens`.
        seed: key of the trajectory's random stream; with the token's position it fixes every draw.
        adapter: name of the LoRA adapter that answers; "": the model itself.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    generated_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    adapter: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.id!r}: the prompt has no tokens")
        try:
            check_sampling(self)
        except ValueError as error:
            raise ValueError(f"request {self.id!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What one `generate` call added to a trajectory.

    Attributes:
        token_ids: the new tokens only.
        logprobs: of those tokens, under the model's distribution at temperature 1 without top-k or top-p.
        finished: False when the request was aborted; it can be resumed from its tokens.
        finish_reason: "stop", "length" or "abort".
        weight_version: of the weights that produced the last token (or that were loaded, if there is none).
        versions: weight version of each token.
    """

    id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    finish_reason: str
    weight_version: int
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What was generated since the last chunk; the last chunk of a request has a `finish_reason`.

    `versions`: the weight version of each token.
    """

    id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None = None
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodingCounters:
    """What an executor has done since it was made.

    Attributes:
        steps: decoding steps. seconds: that they took. tokens: sum over the steps of the requests decoded in each.
        running: requests of the last step, those included that ended in it; waiting: for which it had no room.
        late_s: by how much steps took longer than was declared, where it was.
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    running: int = 0
    waiting: int = 0
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Collected:
    """What a replica generated since it was last asked.

    Attributes:
        chunks: in the order in which they came. counters: up to now.
        refused: requests that can never be answered: their ids, and why.
    """

    chunks: tuple[GenerationChunk, ...]
    counters: DecodingCounters
    refused: tuple[tuple[tuple[str, ...], str], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer: its tokens, their log-probabilities and, where a tokenizer is known, its text.

    Attributes:
        generated: per token, whether the model produced it; False for what an `on_turn` callback appended, whose
            log-probability is 0. Multiply a per-token loss by it.
        finish_reason: "stop", "length" or "abort", of the last turn.
        turns: how many times the model was asked.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weight_version: int
    generated: tuple[bool, ...] = ()
    turns: int = 1


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a streamed answer; the last one has a `finish_reason`."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


def check_sampling(params: "SamplingParams | GenerationRequest") -> None:
    """Raises ValueError naming the first parameter that is out of range or of another type."""
    _check_whole("max_new_tokens", params.max_new_tokens, 1)
    _check_whole("top_k", params.top_k, 0)
    if params.seed is not None:
        _check_whole("seed", params.seed, -(2**63))
    for token in params.stop_token_ids:
        _check_whole("an element of stop_token_ids", token, 0)
    temperature: Any = params.temperature
    if not isinstance(temperature, Real) or not float(temperature) >= 0:  # also for a NaN
        raise ValueError(f"temperature is {temperature!r}; it must be 0 (greedy) or more")
    top_p: Any = params.top_p
    if not isinstance(top_p, Real) or not 0 < float(top_p) <= 1:
        raise ValueError(f"top_p is {top_p!r}; it must be in (0, 1]")


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, Integral) or not least <= int(value) < 2**63:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least {least} and less than 2**63")


def continued(request: GenerationRequest, result: GenerationResult) -> GenerationRequest:
    """The request that goes on where `result` stopped."""
    return replace(request, generated_ids=request.generated_ids + result.token_ids)
