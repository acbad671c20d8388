"""What a part that shares does where others' gangs leave it next to nothing: it asks for one, too.

A gang goes before every rollout, and somebody who asks for one again and again would leave a rollout nothing for ever.
Among gangs nobody waits without bound.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set

from rlix.flow.parts.local import Shared
from rlix.flow.parts.ranks import Ranks
from rlix.flow.programs.step_lease import StepLease
from rlix.protocol.errors import RlixError, WaitTimeoutError
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
ENOUGH = 0.1  # of the time, of all replicas together
_LOOK_S = 1.0


class Patience:
    """Over when in `PATIENCE_S` there was work all the time, hardly any was done, and others took what there was.

    Who had some devices all the while was slow by itself, as replicas that start for the first time are.
    """

    def __init__(self) -> None:
        self._since: tuple[float, float, Set[int]] | None = None

    def is_over(self, now: float, is_open: bool, worked_s: float, leases: Set[int]) -> bool:
        """`leases`: those that it has now, of what comes and goes."""
        if not is_open:
            self._since = None
            return False
        began, before, kept = self._since or (now, worked_s, leases)
        self._since = began, before, kept & leases
        if now - began < PATIENCE_S:
            return False
        if worked_s - before < ENOUGH * (now - began) and not kept & leases:
            return True
        self._since = now, worked_s, leases
        return False


@contextlib.contextmanager
def patient(
    group: Ranks,
    shared: Shared,
    lease: StepLease,
    devices: Sequence[int],
    phase: Phase,
    named: Callable[[], object],
    timeout_s: float,
) -> Iterator[None]:
    """During the block the part, which has this group, gets a gang when its patience is over, and leaves it at the end.

    `named`: to be called before its processes are those of the gang's devices. Raises WaitTimeoutError: it did not
    leave them, so that its processes were ended.
    """
    stop, patience = threading.Event(), Patience()

    def watch() -> None:
        while not stop.wait(_LOOK_S):
            if not patience.is_over(time.monotonic(), shared.is_open, shared.worked_s, shared.leases):
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
        try:
            shared.let_go(timeout_s)
        except WaitTimeoutError:  # raised again; others get these devices next
            group.end()
            raise
