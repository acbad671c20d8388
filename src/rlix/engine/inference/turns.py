"""Answers of several turns: after each, a callback of the user may append tokens (a tool's output) and go on."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlix.engine.inference.prompts import PromptReader, stream_key
from rlix.engine.inference.requests import CompletionOutput, GenerationRequest, GenerationResult, RequestOutput
from rlix.protocol.errors import RlixError

Appended = str | Sequence[int] | None
"""What a callback returns: text or tokens to append before the model goes on; None to stop here."""


class TurnError(RlixError):
    """An `on_turn` callback raised or returned what cannot be appended; names the prompt's index and the turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model has just added to one answer.

    Attributes:
        index: of the prompt in the call. number: of the turn, from 1.
        text, token_ids: of this turn (text is empty where the model has no tokenizer).
        answer_ids: all tokens after the prompt so far, those of this turn included.
        finish_reason: "stop" or "length", of this turn.
    """

    index: int
    number: int
    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish_reason: str


OnTurn = Callable[[Turn], Appended | Awaitable[Appended]]
Ask = Callable[[GenerationRequest], Awaitable[GenerationResult]]
AskReplica = Callable[[int, GenerationRequest], Awaitable[GenerationResult]]
"""Has the replica of this rank answer."""


async def converse(
    index: int, request: GenerationRequest, ask: Ask, on_turn: OnTurn, reader: PromptReader
) -> RequestOutput:
    """Take turns until the callback says None, the request is aborted, or the model's length is reached.

    `request.max_new_tokens` bounds each turn. Turn k draws from a stream of its own, keyed by the request's seed and k.

    Raises:
        TurnError: see there.
    """
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    generated: tuple[bool, ...] = ()
    number, current = 0, request
    while True:
        result = await ask(current)
        number += 1
        reason = result.finish_reason
        tokens += result.token_ids
        logprobs += result.logprobs
        generated += (True,) * len(result.token_ids)
        if reason == "abort":
            break
        text = reader.decode(result.token_ids)
        turn = Turn(index, number, text, result.token_ids, request.prompt_ids, tokens, reason)
        added = await _appended(on_turn, turn, reader)
        if added is None:
            break
        room = reader.max_length - len(request.prompt_ids) - len(tokens) - len(added)
        if room < 1:
            reason = "length"
            break
        tokens += added
        logprobs += (0.0,) * len(added)
        generated += (False,) * len(added)
        current = replace(
            request,
            prompt_ids=request.prompt_ids + tokens,
            max_new_tokens=min(request.max_new_tokens, room),
            seed=stream_key(request.seed, number),
        )
    answer = CompletionOutput(
        0, reader.decode(tokens), tokens, logprobs, reason, result.weight_version, generated=generated, turns=number
    )
    return RequestOutput(request.id, request.prompt_ids, (answer,))


async def _appended(on_turn: OnTurn, turn: Turn, reader: PromptReader) -> tuple[int, ...] | None:
    where = f"on_turn, prompt {turn.index} after turn {turn.number}"
    try:
        returned = on_turn(turn)
        appended = await returned if inspect.isawaitable(returned) else returned
    except Exception as error:  # the user's code may raise anything
        raise TurnError(f"{where}: {type(error).__name__}: {error}") from error
    try:
        return None if appended is None else reader.tokens(appended)
    except (TypeError, ValueError) as error:
        raise TurnError(f"{where}: what it returned cannot be appended: {error}") from error


async def take_turns(
    requests: Sequence[tuple[int, GenerationRequest]], ask: AskReplica, on_turn: OnTurn, reader: PromptReader
) -> list[RequestOutput]:
    """The answers to requests of several turns, each on the replica it is given with, whose caches know its prefix.

    The first error cancels the rest, and so does whoever cancels this.
    """
    answers = [
        asyncio.ensure_future(converse(index, request, partial(ask, rank), on_turn, reader))
        for index, (rank, request) in enumerate(requests)
    ]
    try:
        return await asyncio.gather(*answers)
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


def run_here(answers: Coroutine[Any, Any, list[RequestOutput]]) -> list[RequestOutput]:
    """Run to the end; in a thread of its own where this one runs an event loop already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(answers)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, answers).result()
