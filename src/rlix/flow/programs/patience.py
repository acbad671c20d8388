"""What a part that shares does where others' gangs leave it next to nothing: it asks for one, too.

A gang goes before every rollout, and somebody who asks for one again and again would leave a rollout nothing for ever.
Among gangs nobody waits without bound.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rlix.flow.parts.local import Shared
from rlix.flow.programs.step_lease import StepLease
from rlix.protocol.errors import RlixError
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
ENOUGH = 0.1  # of the time
_LOOK_S = 1.0


class Patience:
    """Over when in `PATIENCE_S` there was work all the time, and hardly any was done."""

    def __init__(self) -> None:
        self._since: tuple[float, float] | None = None

    def is_over(self, now: float, is_open: bool, worked_s: float) -> bool:
        if not is_open:
            self._since = None
            return False
        began, before = self._since = self._since or (now, worked_s)
        if now - began < PATIENCE_S:
            return False
        if worked_s - before < ENOUGH * (now - began):
            return True
        self._since = now, worked_s
        return False


@contextlib.contextmanager
def patient(
    shared: Shared,
    lease: StepLease,
    devices: Sequence[int],
    phase: Phase,
    named: Callable[[], object],
    timeout_s: float,
) -> Iterator[None]:
    """During the block the part gets a gang when its patience is over, and leaves it at the end.

    `named`: to be called before its processes are those of the gang's devices. Raises what `Shared.let_go` raises.
    """
    stop, patience = threading.Event(), Patience()

    def watch() -> None:
        while not stop.wait(_LOOK_S):
            if not patience.is_over(time.monotonic(), shared.is_open, shared.worked_s):
                continue
            try:
                named()
                shared.hold(lease.add(devices, phase, stop))
                while not stop.wait(_LOOK_S) and shared.holds:
                    pass
                if not stop.is_set():  # its replicas have failed: others begin where bundles come
                    shared.let_go(timeout_s)
                    lease.end()
            except InterruptedError:
                return
            except RlixError as error:  # it goes on with what comes and goes
                logger.warning("no gang for %s: %s", devices, error)

    watching = threading.Thread(target=watch, name="patience", daemon=True)
    watching.start()
    try:
        yield
    finally:
        stop.set()
        watching.join()
        shared.let_go(timeout_s)
