"""IMPALA's and APPO's learners update in a thread of their own: it works only while their bytes are on the device."""

import contextlib
import queue
import threading
import time
from typing import Any

from rlix.protocol.errors import RlixError, WaitTimeoutError

DRAIN_TIMEOUT_S = 600.0  # to learn from all that one training step handed over
_FAILED = "an update in RLlib's learner thread failed, and ended it: its traceback is above"
_POLL_S = 0.001  # RLlib's own circular buffer asks ten times as often
_STOP_POLL_S = 0.1


class ThreadGate:
    """Around the queue of batches to the learner's thread; a batch is taken out and learnt from under one lock."""

    def __init__(self, learner: Any, *, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Before the first update. The queue is a `Queue`, or APPO's `CircularBuffer`."""
        self._learner = learner
        self._drain_timeout_s = drain_timeout_s
        self._thread = learner._learner_thread
        self._queue = self._thread._in_queue
        self._lock = threading.Lock()
        self._busy = False
        self._inside = False  # the thread waits for its first batch at the queue itself
        self._failed = False
        self._update = self._thread._update_method
        self._thread._in_queue = learner._learner_thread_in_queue = self
        self._thread._update_method = self._updated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put(self, batch: Any, block: bool = True) -> Any:
        """Raises RlixError when an update has raised: nobody takes batches any more."""
        while not self._failed:
            with contextlib.suppress(queue.Full):
                return self._queue.put(batch, block=block, timeout=_STOP_POLL_S)
        raise RlixError(_FAILED)

    def _updated(self, /, **how: Any) -> Any:
        """In the learner's thread, which an update that raises ends: who waits for its results would wait for ever.

        RLlib hands the learner over by name, as `self`.
        """
        try:
            return self._update(**how)
        except BaseException:  # raised again
            self._failed = True
            self._learner._agg_event.set()
            raise

    def get(self) -> Any:
        """The learner's thread is done with the batch before, and waits for another one."""
        self._inside = True
        if self._busy:
            self._busy = False
            self._lock.release()
        while not self._thread.stopped:
            if self._lock.acquire(timeout=_STOP_POLL_S):
                if self._queue.qsize():
                    self._busy = True
                    return self._queue.get()
                self._lock.release()
                time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """Everything that was handed over is learnt from; from now on the thread touches no tensor.

        Raises RlixError when an update raised: RLlib's thread ends with it. WaitTimeoutError: it takes too long.
        """
        deadline = time.monotonic() + self._drain_timeout_s
        while True:
            if self._lock.acquire(timeout=_STOP_POLL_S):
                if not self._queue.qsize() and (self._inside or not self._learner._submitted_updates):
                    return
                self._lock.release()
                time.sleep(_POLL_S)
            if not self._thread.is_alive():
                raise RlixError(_FAILED)
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    "RLlib's learner thread has not learnt from all it was handed over within "
                    f"{self._drain_timeout_s:.0f} s ({self._queue.qsize()} batches wait): the lease is held until the "
                    "job ends"
                )

    def open(self) -> None:
        """The bytes are on the device again."""
        self._lock.release()
