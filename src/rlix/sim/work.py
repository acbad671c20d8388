"""What a rollout is to the rest of the simulator, however its way through its trajectories is computed."""

from dataclasses import dataclass
from typing import Protocol

from rlix.sim.decoder import Decoder

MOMENT_S = 1e-6
"""Whoever has no more left has ended, but for rounding."""


@dataclass(frozen=True, slots=True)
class Done:
    """`tight_gpu_s`: GPU-seconds for these tokens that no order and no width can save."""

    tokens: float
    tight_gpu_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """Tokens to go; on k bundles they end in `floor_s + work_s / k` seconds, both 0 when that cannot be told."""

    tokens: float
    work_s: float = 0.0
    floor_s: float = 0.0


class Rollout(Protocol):
    """A rollout in flight. Time is told to it by `advance`; it decodes on as many bundles as `resize` said last."""

    unused_gpu_s: float
    """Of bundles without a trajectory."""
    prefill_gpu_s: float
    """For context that was computed again because its trajectory had to move."""

    @property
    def alive(self) -> int:
        """Trajectories that have not ended."""
        ...

    @property
    def depth(self) -> float:
        """Tokens that those have, on average or each."""
        ...

    @property
    def done(self) -> Done: ...

    def advance(self, elapsed_s: float) -> None: ...

    def remaining_s(self) -> float:
        """Seconds until the last trajectory ends at the present width, or at least so many: whoever comes then asks
        again. Infinite where none will."""
        ...

    def finish(self) -> None:
        """All trajectories have ended."""

    def resize(self, bundles: int) -> None: ...

    def interruptible_s(self, bundle: int) -> float:
        """Seconds until this one of its bundles, from 0 on, can be stopped; `resize` stops those with most."""
        ...


class Work(Protocol):
    """The trajectories of one step, as they were drawn."""

    decoder: Decoder

    @property
    def total(self) -> Done: ...

    def shortest_s(self, bundles: int) -> float:
        """No rollout of them on so many bundles takes less."""
        ...

    def outlook(self, alive: int, depth: float) -> Outlook:
        """Of so many trajectories at that depth, were they as long as these."""
        ...

    def begin(self) -> Rollout: ...
