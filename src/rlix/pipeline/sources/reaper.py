"""Ends process groups whose owner is gone: run as a script (standard library only), told on its input whom to watch.

"+7" watches group 7, "-7" no longer does. The input ends when the owner closes it or dies, however it dies; what is
watched then is killed. A blocked environment could not notice that itself, nor end what it has started.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def reap(lines: Iterable[str]) -> None:
    groups: set[int] = set()
    for line in lines:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    reap(sys.stdin)
