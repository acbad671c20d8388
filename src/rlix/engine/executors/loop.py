"""An executor whose backend is owned by one thread: everything else posts commands that run between two steps."""

import itertools
import logging
import math
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from rlix.engine.declared import Deadlines
from rlix.engine.executors.base import ExecutorOptions, Site
from rlix.engine.executors.moves import MovingExecutor
from rlix.engine.inference.requests import DecodingCounters, GenerationChunk, GenerationRequest, GenerationResult
from rlix.engine.life_cycle import Part
from rlix.engine.model_source import ModelSource
from rlix.engine.time_limits import loading_s
from rlix.protocol.errors import NotResidentError, WaitTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMMAND_TIMEOUT_S = 600.0
_JOIN_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Call:
    """One `submit`: its future completes when every request has a result."""

    size: int
    future: "Future[list[GenerationResult]]"
    on_chunk: Callable[[GenerationChunk], object] | None = None
    every_s: float = 0.0
    sent: dict[int, int] = field(default_factory=dict)  # index of a request -> its tokens that were in chunks
    results: dict[int, GenerationResult] = field(default_factory=dict)

    def send(self, index: int, chunk: GenerationChunk) -> None:
        assert self.on_chunk is not None
        self.sent[index] = self.sent.get(index, 0) + len(chunk.token_ids)
        if chunk.token_ids or chunk.finish_reason:
            self.on_chunk(chunk)

    def put(self, index: int, result: GenerationResult) -> None:
        self.results[index] = result
        if self.on_chunk is not None:
            new = slice(self.sent.get(index, 0), None)
            tokens, logprobs, versions = result.token_ids[new], result.logprobs[new], result.versions[new]
            self.send(index, GenerationChunk(result.id, tokens, logprobs, result.finish_reason, versions))
        if len(self.results) == self.size:
            with suppress(InvalidStateError):  # it was cancelled
                self.future.set_result([self.results[i] for i in range(self.size)])

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class LoopExecutor(MovingExecutor):
    """Turns concurrent calls into one running batch, and keeps the life cycle.

    Subclasses say what a step is and how bytes move. All that they implement runs on the loop's thread.
    """

    def __init__(self, source: ModelSource, options: ExecutorOptions, site: Site) -> None:
        super().__init__(source, options, site)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._posting, self._closed = threading.Lock(), False
        self._open: dict[int, tuple[_Call, int, GenerationRequest]] = {}
        self._keys = itertools.count()
        self._counters = DecodingCounters()
        self._deadlines = Deadlines()
        self._new_context = 0  # tokens that the next step computes before it decodes
        self._stream_due = math.inf  # monotonic seconds; when the next call wants chunks
        self._thread = threading.Thread(target=self._loop, name="decoder", daemon=True)
        self._thread.start()

    # ---- what a backend does: decoding -----------------------------------------------------------------------

    @abstractmethod
    def _check(self, request: GenerationRequest) -> None:
        """Raise ValueError when this request can never be answered."""

    @abstractmethod
    def _start(self, key: int, request: GenerationRequest) -> None: ...

    @abstractmethod
    def _step(self) -> Mapping[int, GenerationResult]:
        """Advance what was started; the results of what ended."""

    @abstractmethod
    def _drawn(self, key: int, since: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, their log-probabilities and versions, of what was started, after its first `since` ones."""

    @abstractmethod
    def _in_batch(self) -> int:
        """How many of those that were started the next step decodes, as far as is known."""

    @abstractmethod
    def _cancel(self, key: int, request: GenerationRequest) -> GenerationResult:
        """End what was started with the tokens it has."""

    @abstractmethod
    def _recover(self) -> None:
        """After a failed step: forget everything that was started, and be ready for more."""

    def _shut_down(self) -> None:
        """End what the backend started besides this thread."""

    # ---- InferenceExecutor -----------------------------------------------------------------------------------

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_chunk: Callable[[GenerationChunk], object] | None = None,
        every_s: float = 0.0,
    ) -> "Future[list[GenerationResult]]":
        future: Future[list[GenerationResult]] = Future()
        if not requests:
            future.set_result([])
            return future
        call = _Call(len(requests), future, on_chunk, every_s)
        if not self._post(lambda: self._accept(tuple(requests), call)):
            call.fail(_closed())
        future.add_done_callback(lambda _: self._post(lambda: self._abandon(call)) if future.cancelled() else None)
        return future

    @property
    def counters(self) -> DecodingCounters:
        return self._counters

    def abort(self, request_ids: Sequence[str] | None) -> None:
        ids = None if request_ids is None else frozenset(request_ids)
        self._run("abort", lambda: self._abort(ids))

    def close(self) -> None:
        with self._posting:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join(timeout=_JOIN_TIMEOUT_S)

    # ---- on the thread: decoding -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            try:
                if self._open and self._commands.empty():
                    self._advance()
                    continue
                command = self._commands.get()
                if command is None:
                    break
                command()
            except Exception as error:  # or the thread would end, and everybody wait who comes after
                logger.exception("the decoding loop failed")
                self._break(error, f"the decoding loop failed: {error}", *Part)
        self._fail(_closed())
        self._shut_down()

    def _advance(self) -> None:
        start = time.perf_counter()
        try:
            ended = self._step()
        except Exception as error:  # whatever it is, the calls in flight get it; the next starts with an empty batch
            logger.exception("a decoding step failed")
            self._fail(error)
            try:
                self._recover()
            except Exception as second:  # whatever it is, it must not end the thread
                logger.exception("a decoder could not be started again")
                self._break(second, f"a decoding step failed ({error}), and the start after it: {second}", *Part)
            return
        decoded = self._in_batch() + len(ended)
        self._deadlines.reach(start, self._options.declared.decode_s(decoded, self._new_context))
        self._new_context = 0
        self._count(time.perf_counter() - start, len(ended))
        self._finish(ended.items())
        self._stream()

    def _count(self, seconds: float, ended: int) -> None:
        before, running = self._counters, self._in_batch() + ended  # whose room is taken when the next step begins
        self._counters = DecodingCounters(
            steps=before.steps + 1,
            seconds=before.seconds + seconds,
            tokens=before.tokens + running,
            running=running,
            waiting=len(self._open) - running,
            late_s=self._deadlines.late_s,
        )

    def _stream(self) -> None:
        now = time.monotonic()
        if now < self._stream_due:
            return
        due = math.inf
        for key, (call, index, request) in list(self._open.items()):
            if call.on_chunk is not None and key in self._open:
                tokens, logprobs, versions = self._drawn(key, call.sent.get(index, 0))
                due = min(due, now + call.every_s)
                try:
                    call.send(index, GenerationChunk(request.id, tuple(tokens), tuple(logprobs), None, tuple(versions)))
                except Exception as error:  # noqa: BLE001 - the caller's own: its call ends, the others go on
                    self._abandon(call, error)
        self._stream_due = due

    def _finish(self, ended: Iterable[tuple[int, GenerationResult]]) -> None:
        for key, result in ended:
            call, index, _ = self._open.pop(key)
            try:
                call.put(index, result)
            except Exception as error:  # noqa: BLE001 - as above
                self._abandon(call, error)

    @property
    def _in_flight(self) -> int:
        return len(self._open)

    def _forget_adapter(self, name: str) -> None:
        """What is in flight with it ends first, with the tokens it has."""
        self._abort(frozenset(request.id for _, _, request in self._open.values() if request.adapter == name))
        super()._forget_adapter(name)

    def _fail(self, error: Exception) -> None:
        calls = [call for call, _, _ in self._open.values()]
        self._open.clear()
        for call in calls:
            call.fail(error)

    def _abandon(self, call: _Call, error: Exception | None = None) -> None:
        """Nobody waits for this call any more: end what it started."""
        for key, (owner, _, request) in list(self._open.items()):
            if owner is call:
                self._cancel(key, request)
                del self._open[key]
        if error is not None:
            call.fail(error)

    def _accept(self, requests: tuple[GenerationRequest, ...], call: _Call) -> None:
        if call.future.cancelled():
            return
        try:
            if self.life.draining:  # it was submitted just before that: aborted before its first token
                for index, request in enumerate(requests):
                    call.put(index, GenerationResult(request.id, (), (), False, "abort", self.life.version))
                return
            self.life.check_serving("this replica")
            for request in requests:
                self._check_adapter(request)
                self._check(request)
            if call.on_chunk is not None:
                self._stream_due = min(self._stream_due, time.monotonic() + call.every_s)
            for index, request in enumerate(requests):
                self._accept_one(call, index, request)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._abandon(call, error)

    def _check_adapter(self, request: GenerationRequest) -> None:
        if reason := self._refused.get(request.adapter):
            raise ValueError(f"request {request.id!r}: adapter {request.adapter!r} cannot be served: {reason}")

    def _accept_one(self, call: _Call, index: int, request: GenerationRequest) -> None:
        reason = _answered(request)
        if reason is not None:
            call.put(index, GenerationResult(request.id, (), (), True, reason, self.life.version))
            return
        key = next(self._keys)
        self._start(key, request)
        self._new_context += len(request.prompt_ids) + len(request.generated_ids)
        self._open[key] = (call, index, request)

    def _abort(self, ids: frozenset[str] | None) -> None:
        aborted = [(key, request) for key, (_, _, request) in self._open.items() if ids is None or request.id in ids]
        self._finish([(key, self._cancel(key, request)) for key, request in aborted])

    # ---- commands --------------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> bool:
        """Have it run on the thread; False when that has ended."""
        with self._posting:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    def _run(self, name: str, action: Callable[[], T], size: int = 0) -> T:
        future: Future[T] = Future()
        limit_s = loading_s(size, COMMAND_TIMEOUT_S)

        def command() -> None:
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
                future.set_exception(error)

        if not self._post(command):
            raise _closed()
        try:
            return future.result(timeout=limit_s)
        except TimeoutError:
            if future.done():  # the action's own
                raise
            raise WaitTimeoutError(f"{name} did not end within {limit_s:g} s") from None


def _closed() -> NotResidentError:
    return NotResidentError("the executor was closed: build() the engine again")


def _answered(request: GenerationRequest) -> str | None:
    """The finish reason of a request whose kept tokens are already the whole answer, else None."""
    if request.generated_ids and request.generated_ids[-1] in request.stop_token_ids:
        return "stop"
    return "length" if len(request.generated_ids) >= request.max_new_tokens else None
