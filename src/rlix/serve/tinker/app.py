"""The paths that Tinker's client asks, as a Starlette application."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlix.protocol.errors import RlixError, SpecError
from rlix.serve.tinker import rest
from rlix.serve.tinker.answers import JSON, failure
from rlix.serve.tinker.given import number, read_json
from rlix.serve.tinker.journal import OutOfOrderError
from rlix.serve.tinker.keys import Keys
from rlix.serve.tinker.operations import FORWARD, PASS, SAVE, SAVE_EXTERNAL, SAVE_SAMPLER, STEP
from rlix.serve.tinker.records import State
from rlix.serve.tinker.service import BusyError, Service, UnknownError
from rlix.serve.tinker.wire import read_pass

logger = logging.getLogger(__name__)

API = "/api/v1"
POLL_S = 25.0  # less than the client waits for an answer
_HOUSEKEEPING_S = 5.0
CLIENT_CONFIG = {
    "pjwt_auth_enabled": True,  # so that whoami is answered
    "sample_enable_stuck_detection": False,  # it may stand in the queue of the pool
    "sample_join_sampling_session": True,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
}
REFUSED = {
    "create_custom_loss": "losses run in the client: forward_backward_custom computes them there",
    "retrieve_futures": "results are asked for one by one, with retrieve_future",
    "audit": "there is no audit log; the server's log says what was asked",
    "billing/usage/events": "nothing is billed; `rlix report` says what a job was given",
    "sessions/search": "list_sessions and get_session say what there is",
}
"""Paths that are refused, and what to do instead."""

Handler = Callable[[Request, str], Awaitable[Response]]


class Results:
    """Wakes whoever waits for a result. `finished` is called from any thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def begin(self) -> None:
        """On the loop that serves."""
        self._loop = asyncio.get_running_loop()

    def finished(self, id: str) -> None:
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self._wake, id)

    def close(self) -> None:
        """Who waits, or asks from now on, is answered at once: the server ends, and would cut them off."""
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self._closed = True
        for id in list(self._waiting):
            self._wake(id)

    def _wake(self, id: str) -> None:
        for event in self._waiting.pop(id, []):
            event.set()

    async def wait(self, id: str, timeout_s: float) -> None:
        if self._closed:
            return
        event = asyncio.Event()
        self._waiting.setdefault(id, []).append(event)
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            left = [other for other in self._waiting.get(id, []) if other is not event]
            if left:
                self._waiting[id] = left
            else:
                self._waiting.pop(id, None)


class Door:
    """Args:
    most: bytes of a body.
    """

    def __init__(self, service: Service, keys: Keys, results: Results, *, most: int, results_kept_s: float) -> None:
        self._service, self._keys, self._results, self._most = service, keys, results, most
        self._kept_s = results_kept_s

    def app(self) -> Starlette:
        posts: dict[str, Handler] = {
            "client/config": self._fixed(CLIENT_CONFIG),
            "client/dynamic_config": self._fixed({"sample_cancel_enabled": True}),
            "telemetry": self._fixed({"status": "accepted"}),
            "auth/token": self.token,
            "create_session": self._call(self._service.create_session),
            "session_heartbeat": self._call(self._service.heartbeat),
            "sessions/{session}/finish": self.finish,
            "create_model": self._future(self._service.create_model),
            "get_info": self._call(self._service.info),
            "unload_model": self._call(self._service.unload),
            "forward_backward": self.run_pass,
            "load_weights": self.load,
            **{kind: self._operation(kind) for kind in (STEP, SAVE, SAVE_SAMPLER, SAVE_EXTERNAL)},
            "create_sampling_session": self._call(self._service.create_sampler),
            "join_sampling_session": self._call(self._service.join_sampler),
            "asample": self.sample,
            "retrieve_future": self.retrieve,
            "cancel_future": self.cancel,
            **rest.posts(self._service, self._json),
        }
        gets: dict[str, Handler] = {
            "healthz": self._fixed({"status": "ok"}),
            "get_server_capabilities": self._capabilities,
            **rest.gets(self._service, self._keys),
        }
        routes = [Route(f"{API}/{path}", self._guarded(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(f"{API}/{path}", self._guarded(handler), methods=["GET"]) for path, handler in gets.items()]
        routes += [
            Route(f"{API}/{path}", self._guarded(handler), methods=[method])
            for (method, path), handler in rest.changes(self._service, self._json).items()
        ]
        routes += [
            Route(f"{API}/{path}", self._guarded(_refusing(path, why)), methods=["GET", "POST"])
            for path, why in REFUSED.items()
        ]
        routes.append(Route(f"{API}{rest.FILES}", rest.file_of(self._service, self._keys), methods=["GET"]))
        return Starlette(
            routes=routes, lifespan=self._lifespan, exception_handlers={404: _no_such_path, 405: _no_such_path}
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._results.begin()
        housekeeping = asyncio.create_task(self._keep_house())
        try:
            yield
        finally:
            housekeeping.cancel()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            try:
                await asyncio.to_thread(self._service.end_silent_sessions)
                await asyncio.to_thread(self._service.store.expire)
                await asyncio.to_thread(self._service.journal.drop_results, time.time() - self._kept_s)
            except (RlixError, OSError) as error:  # the next time
                logger.warning("housekeeping failed: %s", error)

    # ---- what surrounds every request ------------------------------------------------------------------------

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            user = self._keys.user_of(request.headers.get("x-api-key", ""))
            if user is None:
                return refusal(
                    401,
                    "the key is nobody's here: TINKER_API_KEY, or api_key=..., must be this server's (X-API-Key)",
                )
            try:
                return await handler(request, user)
            except UnknownError as error:
                return refusal(404, str(error))
            except (SpecError, OutOfOrderError) as error:
                return refusal(400, str(error))
            except RecursionError:
                return refusal(400, "the body is nested too deeply")
            except BusyError as error:
                return refusal(429, str(error))
            except RlixError as error:  # a full disk, say: the client asks again
                return refusal(503, str(error))

        return answer

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise SpecError("the body must not be compressed: the client config says so")
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._most:
                raise SpecError(f"the body has more than {self._most:,} bytes: send less at once")
            parts.append(part)
        return b"".join(parts)

    async def _json(self, request: Request) -> dict[str, Any]:
        return read_json(await self._body(request))

    def _call(self, method: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> Handler:
        async def handle(request: Request, user: str) -> Response:
            return JSONResponse(await asyncio.to_thread(method, user, await self._json(request)))

        return handle

    def _future(self, method: Callable[[str, Mapping[str, Any]], str]) -> Handler:
        async def handle(request: Request, user: str) -> Response:
            return JSONResponse({"request_id": await asyncio.to_thread(method, user, await self._json(request))})

        return handle

    def _operation(self, kind: str) -> Handler:
        async def handle(request: Request, user: str) -> Response:
            body = await self._body(request)
            given = read_json(body)
            asked = (user, kind, given.get("model_id"), number(given, "seq_id", 1), body)
            return JSONResponse({"request_id": await asyncio.to_thread(self._service.ask, *asked)})

        return handle

    def _fixed(self, answer: Mapping[str, Any]) -> Handler:
        async def handle(request: Request, _: str) -> Response:
            await self._body(request)
            return JSONResponse(dict(answer))

        return handle

    # ---- requests --------------------------------------------------------------------------------------------

    async def token(self, _: Request, user: str) -> Response:
        return JSONResponse({"jwt": self._keys.token(user)})

    async def _capabilities(self, _: Request, __: str) -> Response:
        return JSONResponse(self._service.capabilities())

    async def finish(self, request: Request, user: str) -> Response:
        given = await self._json(request)
        await asyncio.to_thread(self._service.finish_session, user, request.path_params["session"], given)
        return Response(status_code=204)

    async def run_pass(self, request: Request, user: str) -> Response:
        body = await self._body(request)
        asked = await asyncio.to_thread(read_pass, body)
        kind = FORWARD if asked.forward_only else PASS
        id = await asyncio.to_thread(
            self._service.ask, user, kind, asked.model, number({"seq_id": asked.seq}, "seq_id", 1), body
        )
        return JSONResponse({"request_id": id})

    async def load(self, request: Request, user: str) -> Response:
        body = await self._body(request)
        return JSONResponse({"request_id": await asyncio.to_thread(self._service.load, user, read_json(body), body)})

    async def sample(self, request: Request, user: str) -> Response:
        body = await self._body(request)
        return JSONResponse(await asyncio.to_thread(self._service.sample, user, read_json(body), body))

    async def retrieve(self, request: Request, user: str) -> Response:
        id = (await self._json(request)).get("request_id")
        patience_s = 0.0 if await request.is_disconnected() else POLL_S
        try:
            found = self._service.result(user, id)
            if found.state is State.QUEUED:  # nothing comes in between: whoever finishes it wakes this
                await self._results.wait(found.id, patience_s)
                found = self._service.result(user, id)
        except UnknownError as error:
            return Response(failure(str(error), "user")[1], media_type=JSON)
        if found.state is State.QUEUED:
            why = await asyncio.to_thread(self._service.why, found)
            said = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": why}
            return JSONResponse(said, status_code=408)
        if not found.media:
            return Response(
                failure(f"the result of {id} was kept for a while, and is gone", "user")[1], media_type=JSON
            )
        return Response(found.result, media_type=found.media)

    async def cancel(self, request: Request, user: str) -> Response:
        found = self._service.result(user, (await self._json(request)).get("request_id"))
        media, result = failure("its client cancelled it", "user")
        if found.kind == "sample":
            self._service.journal.finish(found.id, State.FAILED, media, result)
            self._results.finished(found.id)
        return Response(status_code=204)


def _refusing(path: str, why: str) -> Handler:
    async def handle(_: Request, __: str) -> Response:
        raise SpecError(f"{path} is refused: {why}")

    return handle


def refusal(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status_code=status)


async def _no_such_path(request: Request, _: Exception) -> Response:
    return refusal(
        404,
        f"{request.method} {request.url.path} is not served: docs/tinker-client.md lists the client's methods that are",
    )
