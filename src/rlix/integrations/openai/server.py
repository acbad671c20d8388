"""The HTTP face: /v1/chat/completions, /v1/completions, /v1/models, /v1/episodes and /v1/reward."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlix.integrations.openai.conversation import Heard, RequestError, UnknownModelError
from rlix.integrations.openai.episodes import AbortedError, Episode, Episodes
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.samples import End
from rlix.pipeline.sources.base import ended
from rlix.pipeline.sources.place import EVALUATION, TRAIN
from rlix.protocol.errors import SpecError

_WATCH_S = 0.05  # between looks at what was generated meanwhile, for streams
_TAKE_S = 20.0  # longest that a request for an episode waits for one
_HALF_A_CHARACTER = "\ufffd"
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "seed": (None,),
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
}
"""What of these is no more than the default; the rest would be answered as if it had not been asked."""

_ROWS = "an object with the number of rows that the agent has of a split, such as {'train': 100}"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a client wants."""

    chat: bool
    heard: Heard
    tools: Sequence[Any]
    limit: int | None
    stream: bool
    usage: bool  # at the end of a stream
    logprobs: bool


def make_app(model: str, episodes: Episodes) -> Starlette:
    """`model` is the job's name. Everything runs on the loop that `episodes` lives on."""
    endpoint = _Endpoint(model, episodes)
    routes = [
        Route("/v1/models", endpoint.answering(endpoint.models), methods=["GET"]),
        Route("/v1/chat/completions", endpoint.answering(endpoint.chat), methods=["POST"]),
        Route("/v1/completions", endpoint.answering(endpoint.complete), methods=["POST"]),
        Route("/v1/episodes", endpoint.answering(endpoint.take), methods=["POST"]),
        Route("/v1/reward", endpoint.answering(endpoint.reward), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={404: _no_such_path, 405: _no_such_path})


class _Endpoint:
    def __init__(self, model: str, episodes: Episodes) -> None:
        self._model = model
        self._episodes = episodes

    def answering(self, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            if not self._episodes.known(_key(request)):
                return _error(401, "invalid_api_key", "this is not the job's key")
            try:
                return await handler(request)
            except RequestError as error:
                return _error(error.status, error.code, str(error))
            except SpecError as error:  # what the model's chat template cannot render
                return _error(400, RequestError.code, str(error))
            except (ValueError, KeyError, TypeError) as error:
                return _error(400, RequestError.code, f"what was sent cannot be read: {type(error).__name__}: {error}")
            except AbortedError as error:  # never a short answer as if it were whole
                return _error(503, "aborted", str(error))

        return answer

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "rlix"}]})

    async def take(self, request: Request) -> Response:
        if not self._episodes.is_jobs(_key(request)):
            return _error(401, "invalid_api_key", "an episode's key gives no other episode; use the job's")
        body = await _body(request) if request.headers.get("content-length", "0") != "0" else {}
        split, rows = body.get("split"), _needed({"rows": {}, **body}, "rows", _ROWS, _are_counts)
        if split not in (None, TRAIN, EVALUATION):
            raise RequestError(f"split must be {TRAIN!r} or {EVALUATION!r}, or be left out for any, not {split!r}")
        deadline = time.monotonic() + _TAKE_S
        # Who asked may be gone meanwhile: nobody would play the episode.
        while (gone := await request.is_disconnected()) or (episode := self._episodes.take(split)) is None:
            if gone or time.monotonic() > deadline:
                return _error(503, "no_episode", "no episode is open: the job is training; ask again")
            await asyncio.sleep(_WATCH_S)
        place, count = episode.place, rows.get(episode.place.split)
        return JSONResponse(
            {
                "id": episode.id,
                "task": episode.task,
                "seed": episode.seed,
                "split": place.split,
                "row": None if count is None else place.row(count),
                "api_key": self._episodes.key_of(episode),
            }
        )

    async def reward(self, request: Request) -> Response:
        episode, body = self._episode(request), await _body(request)
        error, exact = body.get("error"), body.get("exact")
        reward = 0.0 if error else _needed(body, "reward", "a finite number", _is_finite)
        self._episodes.rewarded(
            episode, float(reward), exact=None if exact is None else bool(exact), error=error and str(error)
        )
        return JSONResponse({"ok": True})

    async def chat(self, request: Request) -> Response:
        episode, body = self._episode(request), await _body(request)
        self._check(body)
        messages = _needed(body, "messages", "a list of objects with a role each", _are_messages)
        tools = _needed({"tools": body.get("tools") or ()}, "tools", "a list of objects", _are_objects)
        heard = episode.conversation.heard(messages, tools)
        limit = _limit(body, "max_completion_tokens", "max_tokens")
        asked = _Asked(True, heard, tools, limit, *_streaming(body), bool(body.get("logprobs")))
        return await self._answer(request, episode, asked)

    async def complete(self, request: Request) -> Response:
        episode, body = self._episode(request), await _body(request)
        self._check(body)
        chat = episode.policy.chat
        prompt = _needed(body, "prompt", "one text, or the ids of tokens of the model, and not empty", chat.readable)
        heard = episode.conversation.heard_tokens(chat.encode(prompt) if isinstance(prompt, str) else prompt)
        logprobs = body.get("logprobs") is not None
        asked = _Asked(False, heard, (), _limit(body, "max_tokens"), *_streaming(body), logprobs)
        return await self._answer(request, episode, asked)

    # ---- below -----------------------------------------------------------------------------------------------

    def _check(self, body: Mapping[str, Any]) -> None:
        """How the policy samples is the job's to say; what would change what is learnt is refused."""
        if (model := body.get("model")) not in (None, self._model):
            raise UnknownModelError(f"the model here is {self._model!r} (the job), not {model!r}")
        if body.get("stop"):
            raise RequestError("stop is not supported here: write it into the job, as rollout.stop")
        for name, fine in _ONLY.items():
            if body.get(name) not in fine:
                raise RequestError(f"{name} {json.dumps(body[name])} is not supported: leave it out")

    def _episode(self, request: Request) -> Episode:
        found = self._episodes.of_key(_key(request))
        if found is None:
            raise RequestError(
                "no episode of this key is open (one ends with its reward): POST /v1/episodes with the job's key gives "
                "one, with a key of its own"
            )
        return found

    async def _answer(self, request: Request, episode: Episode, asked: _Asked) -> Response:
        prompt = asked.heard.prompt_ids
        trajectory, done = self._episodes.start(episode, prompt, asked.limit)
        if asked.stream:
            events = self._stream(request, episode, asked, trajectory, done)
            return StreamingResponse(events, media_type="text/event-stream")
        choice = await self._choice(request, episode, asked, done)
        return JSONResponse({**self._head(trajectory.id, asked, ""), "choices": [choice], "usage": _usage(choice)})

    async def _choice(self, request: Request, episode: Episode, asked: _Asked, done: Any) -> dict[str, Any]:
        """The whole answer, which from now on is part of the conversation, if the client is still there."""
        trajectory, end = await self._episodes.finished(episode, done)
        answer, _ = ended(trajectory, episode.policy.ends)
        chat = episode.policy.chat
        text = chat.decode(answer.token_ids)
        reply = chat.reply(answer.token_ids, trajectory.prompt_ids, asked.tools, trajectory.id) if asked.chat else None
        if not await request.is_disconnected():  # a request that its client gave up goes on until here
            self._episodes.answered(episode, trajectory, end, asked.heard, answer, reply)
        reason = "length" if end is End.LENGTH else "tool_calls" if reply and "tool_calls" in reply else "stop"
        choice = {
            "index": 0,
            "finish_reason": reason,
            "token_ids": list(answer.token_ids),
            "prompt_token_ids": list(trajectory.prompt_ids),
            "weight_versions": list(answer.versions),
        }
        choice |= {"message": reply} if asked.chat else {"text": text}
        if asked.logprobs:
            tokens = [chat.token(id) for id in answer.token_ids]
            pairs = [
                {"token": t, "logprob": p, "top_logprobs": []} for t, p in zip(tokens, answer.logprobs, strict=True)
            ]
            plain = {"tokens": tokens, "token_logprobs": list(answer.logprobs)}
            choice["logprobs"] = {"content": pairs} if asked.chat else plain
        return choice

    async def _stream(
        self, request: Request, episode: Episode, asked: _Asked, trajectory: Trajectory, done: Any
    ) -> AsyncIterator[bytes]:
        """Text as it is generated, wherever that is. One that is aborted ends with an error and without [DONE]."""
        head, sent = self._head(trajectory.id, asked, ".chunk" if asked.chat else ""), 0
        while not done.done():
            await asyncio.sleep(_WATCH_S)
            if not asked.tools and not episode.policy.ends.strings:
                text = episode.policy.chat.decode(list(trajectory.token_ids)).rstrip(_HALF_A_CHARACTER)
                if len(text) > sent:
                    yield _event({**head, "choices": [_delta(asked, text[sent:], None)]})
                    sent = len(text)
        try:
            choice = await self._choice(request, episode, asked, done)
        except AbortedError as error:
            yield _event({"error": {"message": str(error), "type": "aborted", "code": 503}})
            return
        text = (choice["message"].get("content") or "") if asked.chat else choice["text"]
        last = _delta(asked, text[sent:], choice["finish_reason"])
        if asked.chat and (calls := choice["message"].get("tool_calls")):
            last["delta"]["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
        exact = ("token_ids", "prompt_token_ids", "weight_versions", "logprobs")
        last |= {key: choice[key] for key in exact if key in choice}
        yield _event({**head, "choices": [last]})
        if asked.usage:
            yield _event({**head, "choices": [], "usage": _usage(choice)})
        yield b"data: [DONE]\n\n"

    def _head(self, id: str, asked: _Asked, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" if asked.chat else "text_completion"
        return {"id": id, "object": kind + suffix, "created": int(time.time()), "model": self._model}


def _delta(asked: _Asked, text: str, reason: str | None) -> dict[str, Any]:
    if asked.chat:
        return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"index": 0, "text": text, "finish_reason": reason}


async def _body(request: Request) -> dict[str, Any]:
    try:
        found = await request.json()
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError("the body must be a JSON object")
    return found


def _needed(body: Mapping[str, Any], name: str, what: str, fine: Callable[[Any], bool]) -> Any:
    if name not in body:
        raise RequestError(f"{name} is missing: {what}")
    if not fine(body[name]):
        raise RequestError(f"{name} must be {what}")
    return body[name]


def _are_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)


def _are_messages(value: Any) -> bool:
    return _are_objects(value) and bool(value) and all(isinstance(each.get("role"), str) for each in value)


def _are_counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, int) and each > 0 for each in value.values())


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _streaming(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether, and whether with the usage at the end."""
    options = body.get("stream_options")
    return bool(body.get("stream")), isinstance(options, Mapping) and bool(options.get("include_usage"))


def _limit(body: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        if (value := body.get(name)) is not None:
            if not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} must be a whole number of at least 1, not {value!r}")
            return value
    return None


def _usage(choice: Mapping[str, Any]) -> dict[str, int]:
    read, generated = len(choice["prompt_token_ids"]), len(choice["token_ids"])
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


async def _no_such_path(request: Request, _: Exception) -> Response:
    paths = "POST to chat/completions, completions, episodes or reward, or GET models"
    return _error(404, "not_found", f"{request.method} {request.url.path} is not here: {paths}, all under /v1")


def _key(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": code, "code": code}}, status_code=status)


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
