"""The memory of a machine: what there is, what processes use, and who goes first when there is none."""

import contextlib
from pathlib import Path

KEPT, SPENT = 0, 1000
"""Scores for the kernel: of processes on which others depend, and of those that compute."""


def set_oom_score(score: int) -> None:
    """How soon the kernel ends this process when memory is short: from 0 to 1000, which is first.

    Ray gives 1000 to whatever it starts, the control plane's actors too.
    """
    with contextlib.suppress(OSError):  # another system, or a container that does not let us
        Path("/proc/self/oom_score_adj").write_text(str(score))
