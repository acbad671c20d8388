"""Between a job and its loggers: a thread for each, so that none holds up or fails the job."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite

from rlix.pipeline.loggers.base import Logger, Run

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
_Row = tuple[int, dict[str, float]]


class Loggers:
    """Tells every logger what it is told. Nothing is imported or opened before the first row."""

    def __init__(self, loggers: Sequence[Logger], run: Run, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._outlets = [_Outlet(one, run) for one in loggers]
        self._close_timeout_s = close_timeout_s

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Returns at once. What is no finite number is left out."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        row = {name: float(value) for name, value in numbers.items() if isfinite(value)}
        for outlet in self._outlets:
            outlet.put((step, row))

    def close(self, state: str) -> None:
        """Waits for the rows that are on their way, but not for ever."""
        deadline = time.monotonic() + self._close_timeout_s
        for outlet in self._outlets:
            outlet.end(state)
        for outlet in self._outlets:
            outlet.join(max(0.0, deadline - time.monotonic()))


class _Outlet:
    def __init__(self, one: Logger, run: Run) -> None:
        self._logger, self._run = one, run
        self._rows: queue.SimpleQueue[_Row | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._said = False

    def put(self, row: _Row) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=f"log-{self._logger.name}", daemon=True)
            self._thread.start()
        self._rows.put(row)

    def end(self, state: str) -> None:
        self._rows.put(state)

    def join(self, timeout_s: float) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%s took longer than the job waits for it: its last metrics may be lost", self._logger.name)

    def _loop(self) -> None:
        if not self._tried(partial(self._logger.open, self._run)):
            return
        while not isinstance(item := self._rows.get(), str):
            step, metrics = item
            self._tried(partial(self._logger.log, step, metrics))
        self._tried(partial(self._logger.close, item))

    def _tried(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - other people's code may raise anything; it costs its rows only
            if not self._said:
                logger.warning(
                    "%s does not take metrics (%s: %s); the job goes on", self._logger.name, type(error).__name__, error
                )
            self._said = True
            return False
        return True
