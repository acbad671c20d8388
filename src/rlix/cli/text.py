"""How the command line writes numbers, times and names, and says that something takes long."""

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console

_PATIENCE_S = 10.0


def clock(seconds: float) -> str:
    """ "0:04:07"."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def count(number: int, what: str) -> str:
    """ "no job", "1 job", "2 jobs"."""
    return f"{number or 'no'} {what}{'s' if number > 1 else ''}"


@contextlib.contextmanager
def still(console: Console, what: str, every_s: float = _PATIENCE_S) -> Iterator[None]:
    """Says `what` every so often for as long as the block lasts, and for how long it has been so."""
    begun, over = time.monotonic(), threading.Event()

    def say() -> None:
        while not over.wait(every_s):
            console.print(f"{what} ({time.monotonic() - begun:.0f} s)", highlight=False)

    speaker = threading.Thread(target=say, name="still", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()
