"""One thread in each process that speaks for a pipeline: it says that the process lives, and what it holds."""

import logging
import threading
import weakref
from collections.abc import Callable

from rlix.protocol.errors import PipelineGoneError, RlixError

logger = logging.getLogger(__name__)

EVERY_S = 1.0


class Heartbeat:
    """Tells `beat` once a second, as long as its owner lives, which epochs this process knows that it holds."""

    def __init__(self, beat: Callable[[tuple[int, ...]], object], name: str) -> None:
        self._beat = beat
        self._name = name
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends_with_owner = weakref.finalize(self, self._ended.set)

    def holds(self, epoch: int) -> None:
        with self._lock:
            self._held.add(epoch)
            if self._thread is None:
                arguments = (weakref.ref(self), self._ended)
                self._thread = threading.Thread(target=_run, args=arguments, name=f"beat {self._name}", daemon=True)
                self._thread.start()

    def gave_back(self, epoch: int) -> None:
        with self._lock:
            self._held.discard(epoch)

    @property
    def held(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._held))

    def stop(self) -> None:
        self._ended.set()

    def once(self) -> bool:
        """One beat; False when nobody wants to hear more."""
        try:
            self._beat(self.held)
        except PipelineGoneError as error:
            logger.info("%s: the control plane takes no beat any more: %s", self._name, error)
            return False
        except RlixError as error:  # it is away, or slow: it will want to know later, too
            logger.warning("%s: a beat was not heard: %s", self._name, error)
        return True


def _run(owner: "weakref.ref[Heartbeat]", ended: threading.Event) -> None:
    while not ended.wait(EVERY_S):
        heartbeat = owner()
        if heartbeat is None or not heartbeat.once():
            return
        del heartbeat
