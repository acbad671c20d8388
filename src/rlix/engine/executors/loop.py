"""An executor whose backend is owned by one thread: everything else posts commands that run between two steps."""

import itertools
import logging
import math
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from rlix.engine.executors.base import Executor, Part
from rlix.engine.inference.requests import DecodingCounters, GenerationChunk, GenerationRequest, GenerationResult
from rlix.engine.weights.publication import PublishedWeights
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
        if len(self.results) == self.size and not self.future.done():
            self.future.set_result([self.results[i] for i in range(self.size)])


class LoopExecutor(Executor):
    """Turns concurrent calls into one running batch. Subclasses say what a step is; they run on the loop's thread."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[int, tuple[_Call, int, GenerationRequest]] = {}
        self._keys = itertools.count()
        self._counters = DecodingCounters()
        self._stream_due = math.inf  # monotonic seconds; when the next call wants chunks
        self._thread = threading.Thread(target=self._loop, name="decoder", daemon=True)
        self._thread.start()

    # ---- what a backend does ---------------------------------------------------------------------------------

    @abstractmethod
    def _check(self, request: GenerationRequest) -> None:
        """Raise NotResidentError when nothing can be generated now, ValueError when this request never can."""

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
        """After a failed step: forget everything that was started."""

    @abstractmethod
    def _load(self, published: PublishedWeights | None, parts: Sequence[Part]) -> int: ...

    @abstractmethod
    def _update(self, published: PublishedWeights) -> int: ...

    @abstractmethod
    def _offload(self, keep_host: bool) -> int: ...

    def _shut_down(self) -> None:
        """End what the backend started besides this thread."""

    # ---- Executor --------------------------------------------------------------------------------------------

    def load(self, published: PublishedWeights | None, parts: Sequence[Part]) -> int:
        return self._run("load", lambda: self._load(published, parts))

    def update(self, published: PublishedWeights) -> int:
        return self._run("update", lambda: self._update(published))

    def offload(self, *, keep_host: bool) -> int:
        def action() -> int:
            if self._open:
                raise RuntimeError(f"offload() while {len(self._open)} requests are being generated: abort them first")
            return self._offload(keep_host)

        return self._run("offload", action)

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_chunk: Callable[[GenerationChunk], object] | None = None,
        every_s: float = 0.0,
    ) -> "Future[list[GenerationResult]]":
        future: Future[list[GenerationResult]] = Future()
        if requests:
            self._commands.put(lambda: self._accept(tuple(requests), _Call(len(requests), future, on_chunk, every_s)))
        else:
            future.set_result([])
        return future

    @property
    def counters(self) -> DecodingCounters:
        return self._counters

    def abort(self, request_ids: Sequence[str] | None) -> None:
        ids = None if request_ids is None else frozenset(request_ids)
        self._run("abort", lambda: self._abort(ids))

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(timeout=_JOIN_TIMEOUT_S)

    # ---- on the thread ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            if self._open and self._commands.empty():
                self._advance()
                continue
            command = self._commands.get()
            if command is None:
                self._fail(NotResidentError("the executor was closed"))
                self._shut_down()
                return
            command()

    def _advance(self) -> None:
        start = time.perf_counter()
        try:
            ended = self._step()
        except Exception as error:  # whatever it is, the calls in flight get it; the next starts with an empty batch
            logger.exception("a decoding step failed")
            self._fail(error)
            self._recover()
            return
        self._count(time.perf_counter() - start, len(ended))
        self._finish(ended.items())
        self._stream()

    def _count(self, seconds: float, ended: int) -> None:
        before, running = self._counters, self._in_batch()
        self._counters = DecodingCounters(
            steps=before.steps + 1,
            seconds=before.seconds + seconds,
            tokens=before.tokens + running + ended,
            running=running,
            waiting=len(self._open) - ended - running,
        )

    def _stream(self) -> None:
        now = time.monotonic()
        if now < self._stream_due:
            return
        due = math.inf
        for key, (call, index, request) in self._open.items():
            if call.on_chunk is not None:
                tokens, logprobs, versions = self._drawn(key, call.sent.get(index, 0))
                call.send(index, GenerationChunk(request.id, tuple(tokens), tuple(logprobs), None, tuple(versions)))
                due = min(due, now + call.every_s)
        self._stream_due = due

    def _finish(self, ended: Iterable[tuple[int, GenerationResult]]) -> None:
        for key, result in ended:
            call, index, _ = self._open.pop(key)
            call.put(index, result)

    def _fail(self, error: Exception) -> None:
        calls = [call for call, _, _ in self._open.values()]
        self._open.clear()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(error)

    def _accept(self, requests: tuple[GenerationRequest, ...], call: _Call) -> None:
        try:
            for request in requests:
                self._check(request)
            if call.on_chunk is not None:
                self._stream_due = min(self._stream_due, time.monotonic() + call.every_s)
            for index, request in enumerate(requests):
                self._accept_one(call, index, request)
        except Exception as error:  # noqa: BLE001 - the caller gets it; those of its requests that started just end
            call.future.set_exception(error)

    def _accept_one(self, call: _Call, index: int, request: GenerationRequest) -> None:
        reason = _answered(request)
        if reason is not None:
            call.put(index, GenerationResult(request.id, (), (), True, reason, self.version))
            return
        key = next(self._keys)
        self._start(key, request)
        self._open[key] = (call, index, request)

    def _abort(self, ids: frozenset[str] | None) -> None:
        aborted = [(key, request) for key, (_, _, request) in self._open.items() if ids is None or request.id in ids]
        self._finish([(key, self._cancel(key, request)) for key, request in aborted])

    def _run(self, name: str, action: Callable[[], T]) -> T:
        """Run between two steps and return the result; bounded."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
                future.set_exception(error)

        self._commands.put(command)
        try:
            return future.result(timeout=COMMAND_TIMEOUT_S)
        except TimeoutError:
            if future.done():  # the action's own
                raise
            raise WaitTimeoutError(f"{name} waited {COMMAND_TIMEOUT_S:g} s for a decoding step to end") from None


def _answered(request: GenerationRequest) -> str | None:
    """The finish reason of a request whose kept tokens are already the whole answer, else None."""
    if request.generated_ids and request.generated_ids[-1] in request.stop_token_ids:
        return "stop"
    return "length" if len(request.generated_ids) >= request.max_new_tokens else None
