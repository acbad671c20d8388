"""Declared speed: on a virtual GPU, work lasts as long as it would on the GPU that it stands for.

What is computed, moved and learnt is real; only time is made up, by waiting until the work's declared end. Work that
takes longer than declared is not hurried: what it took too long is counted, so that a run says how far its times can
be believed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeclaredSpeed:
    """How long work takes on one GPU, in the terms of the simulator (`rlix.sim.workload`); 0: as long as it takes.

    Attributes:
        token_ms: one decoding step while the batch is below `knee` sequences, from where on arithmetic bounds it.
        kv_us: added to a step by each sequence. prefill_us: by each token of context that is computed.
        trained_token_ms, scored_token_ms: of one GPU, for each token of a training step, and of log-probs or values.
        expand_s, sync_s, shrink_s: weights into an empty replica, new ones into one that stayed, and its leaving.
        move_s: a training state to its GPUs, or away from them. relocate_s: to others than it was on, besides.
    """

    token_ms: float = 0.0
    knee: float = 96.0
    kv_us: float = 0.0
    prefill_us: float = 0.0
    trained_token_ms: float = 0.0
    scored_token_ms: float = 0.0
    expand_s: float = 0.0
    sync_s: float = 0.0
    shrink_s: float = 0.0
    move_s: float = 0.0
    relocate_s: float = 0.0

    def decode_s(self, sequences: int, context_tokens: int) -> float:
        """One decoding step of so many sequences, in which the context of new ones is computed too."""
        step_ms = max(1.0, sequences / self.knee) * self.token_ms
        return step_ms / 1e3 + (sequences * self.kv_us + context_tokens * self.prefill_us) / 1e6


AS_IT_IS = DeclaredSpeed()


class Deadlines:
    """Lets work last as long as was declared, on one thread. `late_s`: the sum of what it took longer.

    Args:
        clock: seconds. sleep: waits so many.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self.late_s = 0.0

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """A block that lasts at least so long, unless it raises."""
        start = self._clock()
        yield
        self.reach(start, seconds)

    def reach(self, start: float, seconds: float) -> None:
        """Wait until so long after `start`."""
        left = start + seconds - self._clock()
        if left > 0:
            self._sleep(left)
        elif seconds:
            self.late_s -= left
