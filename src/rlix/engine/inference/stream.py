"""One answer piece by piece, as its tokens arrive."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray.exceptions import RayError

from rlix.engine.inference.prompts import PromptReader
from rlix.engine.inference.requests import GenerationRequest, TextChunk
from rlix.protocol.errors import WaitTimeoutError, WorkerError


async def text_chunks(
    replica: Any, request: GenerationRequest, reader: PromptReader, timeout_s: float, who: str
) -> AsyncIterator[TextChunk]:
    """What a `Replica` actor answers. The request is aborted when this ends before the answer does.

    Raises:
        WaitTimeoutError: the next piece did not arrive within `timeout_s`. WorkerError: the replica failed. Both say
            `who` it was asked for.
    """
    text, reason = TextStream(reader), None
    pieces = replica.stream.remote([request])
    try:
        while reason is None:
            async with asyncio.timeout(timeout_s):
                chunks = await (await anext(pieces))
            reason = chunks[-1].finish_reason
            tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
            logprobs = tuple(logprob for chunk in chunks for logprob in chunk.logprobs)
            yield TextChunk(text.add(tokens, last=reason is not None), tokens, logprobs, reason)
    except TimeoutError:
        raise WaitTimeoutError(f"{who}: {request.id} had no next piece in {timeout_s:g} s") from None
    except RayError as error:
        raise WorkerError(f"{who}: streaming {request.id} failed: {error}") from error
    finally:
        if reason is None:
            replica.abort.remote([request.id])


class TextStream:
    """The text of an answer whose tokens arrive piece by piece."""

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._tokens: list[int] = []
        self._sent = ""

    def add(self, token_ids: Sequence[int], *, last: bool) -> str:
        """The further text; a character whose tokens have not all arrived waits for them."""
        self._tokens += token_ids
        text = self._reader.decode(self._tokens)
        if not last and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new
