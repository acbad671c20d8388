"""One thing at a time is made ready for; whoever needs another one waits for a turn."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Asked(Generic[K, T]):
    key: K
    begin: "Callable[[], Future[T]]"
    done: "Future[T]"


class Turns(Generic[K, T]):
    """What is asked with one key runs together. For another key it begins when all of it is through, with all that
    were asked for with that key by then: first come, first served, and no key is made ready for more often than that.

    Args:
        change: makes ready for a key, while nothing runs.
    """

    def __init__(self, change: Callable[[K], None]) -> None:
        self._change = change
        self._waiting: deque[_Asked[K, T]] = deque()
        self._running = 0
        self._ready: K | None = None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "turns")  # all that is decided is decided there

    def ask(self, key: K, begin: "Callable[[], Future[T]]") -> "Future[T]":
        """What `begin` gives, or raises, or `change` does."""
        asked: _Asked[K, T] = _Asked(key, begin, Future())
        with self._lock:
            self._waiting.append(asked)
        self._thread.submit(self._look)
        return asked.done

    def close(self) -> None:
        """Nothing more begins."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        with self._lock:
            if not self._waiting or (self._running and self._waiting[0].key != self._ready):
                return
            key = self._waiting[0].key
            chosen = [asked for asked in self._waiting if asked.key == key]
            self._waiting = deque(asked for asked in self._waiting if asked.key != key)
            self._running += len(chosen)
        try:
            if key != self._ready:
                self._ready = None
                self._change(key)
                self._ready = key
        except Exception as error:  # noqa: BLE001 - whoever waits for it is told, whatever it is
            for asked in chosen:
                self._end(asked, error)
            return
        for asked in chosen:
            try:
                begun = asked.begin()
            except Exception as error:  # noqa: BLE001 - as above
                self._end(asked, error)
            else:
                begun.add_done_callback(partial(self._ended, asked))

    def _ended(self, asked: "_Asked[K, T]", begun: "Future[T]") -> None:
        self._end(asked, begun.exception() or begun.result())

    def _end(self, asked: "_Asked[K, T]", found: "T | BaseException") -> None:
        with self._lock:
            self._running -= 1
        if isinstance(found, BaseException):
            asked.done.set_exception(found)
        else:
            asked.done.set_result(found)
        self._thread.submit(self._look)
