"""What a rollout learns of its own speed, and what moving trajectories between replicas costs and gains.

Pure functions, in units of one decoding step.

The model is a roofline. One step over a batch of b trajectories takes 1 + b / knee (in units of a step over an empty
batch): up to the knee the step is bound by reading the weights, beyond it by arithmetic. Arithmetic is all that
prefilling a token costs, so a token of prefill takes 1 / knee of the same unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

_WEIGHT = 0.2  # of a new observation in a running mean
_LINE_WEIGHT = 0.02  # of a new observation in a line: it has seen many batch sizes, and forgets them slowly
_SOME_KNEE = 64  # trajectories, until steps of several batch sizes were seen
_SPREAD = 0.1  # of the mean batch size: with less than that, a line through the observations means nothing


@dataclass(frozen=True, slots=True)
class Work:
    """A trajectory in flight.

    Attributes:
        held: tokens it has, prompt included: what another replica would have to prefill.
        left: expected tokens until it ends.
    """

    held: int
    left: float


@dataclass(slots=True)
class StepLine:
    """Least squares through the seconds of one step over its batch size, recent calls counting most."""

    weight: float = 0.0
    batch: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0

    def saw(self, batch: float, seconds: float) -> None:
        """Weighted moments, updated as in West, "Updating mean and variance estimates", CACM 1979."""
        self.weight = self.weight * (1 - _LINE_WEIGHT) + 1
        share = 1 / self.weight
        off, late = batch - self.batch, seconds - self.seconds
        self.batch += share * off
        self.seconds += share * late
        self.variance = (1 - share) * (self.variance + share * off * off)
        self.covariance = (1 - share) * (self.covariance + share * off * late)

    def knee(self) -> float | None:
        """The batch size at which a step takes twice as long as one over nothing; None where that cannot be told."""
        if self.variance <= (_SPREAD * self.batch) ** 2 or self.covariance <= 0:
            return None
        slope = self.covariance / self.variance
        empty = self.seconds - slope * self.batch
        return empty / slope if empty > 0 else None


@dataclass(slots=True)
class Estimates:
    """What a rollout has learnt from what replicas report. `knee`: batch size at which a step takes twice its least
    time, at most `slots`, the trajectories that one replica decodes at a time.

    `move_s`: seconds between an abort and the first step elsewhere.
    """

    slots: int
    knee: float = 0.0
    move_s: float = 0.05
    step_s: float | None = None
    length: float | None = None  # tokens of a finished trajectory
    line: StepLine = field(default_factory=StepLine)

    def __post_init__(self) -> None:
        self.knee = self.knee or float(min(self.slots, _SOME_KNEE))

    def saw_steps(self, seconds: float, steps: int, tokens: int) -> None:
        """`steps` decoding steps, of `tokens` trajectories together, took `seconds`."""
        if steps > 0 and seconds > 0:
            batch = tokens / steps
            self.line.saw(batch, seconds / steps)
            knee = self.line.knee()
            if knee is not None:
                self.knee = min(max(knee, 1.0), float(self.slots))
            self.step_s = running_mean(self.step_s, seconds / steps / (1 + batch / self.knee))

    def saw_end(self, length: int) -> None:
        """A trajectory ended after `length` tokens."""
        self.length = running_mean(self.length, float(length))

    def expected_left(self, generated: float, limit: int) -> float:
        """Tokens a trajectory is expected to add: up to the mean length, or half a mean when it is already beyond."""
        if self.length is None:
            return max(0.0, limit - generated)
        return max(0.0, min(limit - generated, max(self.length - generated, self.length / 2)))

    def steps_since(self, seconds: float, batch: int) -> float:
        """Decoding steps that fit into `seconds` beside `batch` trajectories."""
        return 0.0 if self.step_s is None else seconds / (self.step_s * (1 + batch / self.knee))


def rollout_s(lefts: Sequence[float], estimates: Estimates) -> tuple[float, float]:
    """Work and floor of a rollout whose trajectories have these numbers of tokens to go: on k bundles, it ends in
    `floor + work / k` seconds, as far as is known. (0, 0) while no step was measured.

    The longest trajectory needs its steps however many bundles there are; the arithmetic of all tokens is divided, and
    so are the rounds it takes when more trajectories are open than fit into one replica's slots.
    """
    if estimates.step_s is None or not lefts:
        return 0.0, 0.0
    tokens, longest = sum(lefts), max(lefts)
    rounds = max(0.0, tokens / estimates.slots - longest)
    return estimates.step_s * (tokens / estimates.knee + rounds), estimates.step_s * longest


def decode_steps(left: float, batch: int, knee: float) -> float:
    """Steps (of an empty batch) until the last of `batch` trajectories, `left` tokens from its end, has ended."""
    return left * (1 + batch / knee)


def to_move(donor: Sequence[Work], target: Sequence[Work], estimates: Estimates) -> list[int]:
    """Which of the donor's trajectories (by index) the target should take over; none unless both end sooner for it.

    With D = `decode_steps`, moving the set M gains D(donor) - max(D(donor - M), move + prefill(M) + D(target + M)),
    where prefill(M) = held(M) / knee and move = move_s / step_s. Those with fewest tokens are tried first, and the
    number with the largest gain wins; without a measured step time nothing is moved.
    """
    if estimates.step_s is None or not donor:
        return []
    knee, overhead = estimates.knee, estimates.move_s / estimates.step_s
    order = sorted(range(len(donor)), key=lambda i: (donor[i].held, i))
    kept = [0.0, *accumulate((donor[i].left for i in reversed(order)), max)]  # the longest of the last n
    there = max((work.left for work in target), default=0.0)
    before = max(decode_steps(kept[-1], len(donor), knee), decode_steps(there, len(target), knee))
    best, count, prefill = 0.0, 0, 0.0
    for k, i in enumerate(order, 1):
        prefill += donor[i].held / knee
        there = max(there, donor[i].left)
        stay = decode_steps(kept[len(donor) - k], len(donor) - k, knee)
        after = max(stay, overhead + prefill + decode_steps(there, len(target) + k, knee))
        if before - after > best:
            best, count = before - after, k
    return sorted(order[:count])


def prefers_cached(held: int, left: float, extra_load: int) -> bool:
    """Whether a trajectory should go back to the replica that has its prefix cached, though it is busier.

    There each of its `left` steps is slower by extra_load / knee; elsewhere its `held` tokens are prefilled for
    held / knee: the cache wins while left * extra_load <= held.
    """
    return left * extra_load <= held


def running_mean(mean: float | None, value: float) -> float:
    """Exponentially weighted; `mean` is None before the first value."""
    return value if mean is None else mean + _WEIGHT * (value - mean)
