"""What moving trajectories between replicas costs and gains: pure functions, in units of one decoding step.

The model is a roofline. One step over a batch of b trajectories takes 1 + b / knee (in units of a step over an empty
batch): up to the knee the step is bound by reading the weights, beyond it by arithmetic. Arithmetic is all that
prefilling a token costs, so a token of prefill takes 1 / knee of the same unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT = 0.2  # of a new observation in a running mean


@dataclass(frozen=True, slots=True)
class Chunk:
    """Trajectories that one call generates, and that can only be moved together.

    Attributes:
        size: how many there are.
        held: tokens they have, prompts included: what another replica would have to prefill.
        left: expected tokens until the last of them ends.
    """

    size: int
    held: int
    left: float


@dataclass(slots=True)
class Estimates:
    """What a rollout has learnt from finished calls. `knee`: batch size at which a step takes twice its least time.

    `move_s`: seconds between an abort and the first step elsewhere.
    """

    knee: float
    move_s: float = 0.05
    step_s: float | None = None
    length: float | None = None  # tokens of a finished trajectory

    def saw_call(self, seconds: float, steps: int, batch: int) -> None:
        """A call of `steps` decoding steps, beside `batch` trajectories in all, took `seconds`."""
        if steps > 0 and seconds > 0:
            self.step_s = _running_mean(self.step_s, seconds / steps / (1 + batch / self.knee))

    def saw_end(self, length: int) -> None:
        """A trajectory ended after `length` tokens."""
        self.length = _running_mean(self.length, float(length))

    def expected_left(self, generated: float, limit: int) -> float:
        """Tokens a trajectory is expected to add: up to the mean length, or half a mean when it is already beyond."""
        if self.length is None:
            return max(0.0, limit - generated)
        return max(0.0, min(limit - generated, max(self.length - generated, self.length / 2)))

    def steps_since(self, seconds: float, batch: int) -> float:
        """Decoding steps that fit into `seconds` beside `batch` trajectories."""
        return 0.0 if self.step_s is None else seconds / (self.step_s * (1 + batch / self.knee))


def decode_steps(chunks: Sequence[Chunk], knee: float) -> float:
    """Steps (of an empty batch) until the last of these trajectories ends: max(left) * (1 + batch / knee)."""
    return max((c.left for c in chunks), default=0.0) * (1 + sum(c.size for c in chunks) / knee)


def chunks_to_move(donor: Sequence[Chunk], target: Sequence[Chunk], estimates: Estimates) -> list[int]:
    """Which of the donor's chunks (by index) the target should take over; none unless both end sooner for it.

    With D = `decode_steps`, moving the set M gains D(donor) - max(D(donor - M), move + prefill(M) + D(target + M)),
    where prefill(M) = held(M) / knee and move = move_s / step_s. Chunks are tried in order of `held`, cheapest first,
    and the number with the largest gain wins; without a measured step time nothing is moved.
    """
    if estimates.step_s is None:
        return []
    knee, overhead = estimates.knee, estimates.move_s / estimates.step_s
    order = sorted(range(len(donor)), key=lambda i: (donor[i].held, i))
    before = max(decode_steps(donor, knee), decode_steps(target, knee))
    best, count = 0.0, 0
    for k in range(1, len(order) + 1):
        moved = [donor[i] for i in order[:k]]
        kept = [donor[i] for i in order[k:]]
        prefill = sum(c.held for c in moved) / knee
        after = max(decode_steps(kept, knee), overhead + prefill + decode_steps([*target, *moved], knee))
        if before - after > best:
            best, count = before - after, k
    return sorted(order[:count])


def prefers_cached(held: int, left: float, extra_load: int) -> bool:
    """Whether a trajectory should go back to the replica that has its prefix cached, though it is busier.

    There each of its `left` steps is slower by extra_load / knee; elsewhere its `held` tokens are prefilled for
    held / knee: the cache wins while left * extra_load <= held.
    """
    return left * extra_load <= held


def _running_mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
