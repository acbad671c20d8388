"""IMPALA's and APPO's learners update in a thread of their own: it works only while their bytes are on the device."""

import threading
import time
from typing import Any

from rlix.protocol.errors import RlixError

_POLL_S = 0.001  # RLlib's own circular buffer asks ten times as often
_STOP_POLL_S = 0.1


class ThreadGate:
    """Between the learner's thread and its queue of batches; a batch is taken out and learnt from under one lock."""

    def __init__(self, learner: Any) -> None:
        """Before the first update. The queue is a `Queue`, or APPO's `CircularBuffer`."""
        self._learner = learner
        self._thread = learner._learner_thread
        self._queue = self._thread._in_queue
        self._lock = threading.Lock()
        self._busy = False
        self._inside = False  # the thread waits for its first batch at the queue itself
        self._thread._in_queue = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

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

        Raises RlixError when an update raised: RLlib's thread ends with it.
        """
        while True:
            if self._lock.acquire(timeout=_STOP_POLL_S):
                if not self._queue.qsize() and (self._inside or not self._learner._submitted_updates):
                    return
                self._lock.release()
                time.sleep(_POLL_S)
            if not self._thread.is_alive():
                raise RlixError("an update in RLlib's learner thread failed, and ended it: its traceback is above")

    def open(self) -> None:
        """The bytes are on the device again."""
        self._lock.release()
