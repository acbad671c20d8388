"""An event loop on a thread of its own: samples are made while the pipeline trains."""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_END_S = 10.0
T = TypeVar("T")


class LoopThread:
    """Runs coroutines until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="samples", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start it; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel what runs, then run `last`. What ignores that, or blocks the thread, is left behind after seconds."""
        try:
            self.submit(self._end(last)).result(timeout=_END_S)
        except TimeoutError:
            logger.warning("what makes samples was still busy %g s after they were told to end", _END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_END_S / 2)
        if last is not None:
            await last
