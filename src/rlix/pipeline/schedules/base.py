"""What a schedule is: it asks a source for samples and says when rollouts get new weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlix.engine.weights.publication import Published
from rlix.pipeline.algorithms.advantages import groups_with_spread
from rlix.pipeline.samples import Sample, Samples
from rlix.pipeline.sources.base import Source


@dataclass(frozen=True, slots=True)
class Supply:
    """What a schedule works with.

    Args:
        publish: rollouts generate with these weights from now on.
        steps: of the whole job.
        resample_rounds: how often groups without spread are replaced.
    """

    source: Source
    publish: Callable[[Published], None]
    steps: int
    resample_rounds: int = 0


class Schedule(ABC):
    """One object for the life of a job. `Options` (a pydantic model or a dataclass) checks `schedule.options`.

    Whether samples come from an older policy than the one that they train, and how old they are, is read from their
    tokens.
    """

    Options: Any = None

    def __init__(self, options: Any, supply: Supply) -> None:
        self.options = options
        self.supply = supply

    @abstractmethod
    def samples(self, step: int) -> Samples:
        """What step `step` learns from."""

    def publish(self, weights: Published) -> None:
        """New weights are there."""
        self.supply.publish(weights)

    def settle(self) -> None:
        """Return when rollouts generate with the newest weights."""


def with_spread(step: int, samples: Samples, supply: Supply) -> Samples:
    """`samples` with groups without spread replaced by groups of new prompts, in `resample_rounds` rounds at most.

    What is flat after the last stays, so that a batch always has the same size. The curves stay those of the first.
    """
    curves = dict(samples.curves)
    resampled = 0
    for extra in range(1, supply.resample_rounds + 1):
        flat = _groups(samples, with_spread=False)
        if not flat:
            break
        more = supply.source.finish(supply.source.begin(step + extra * supply.steps, len(flat)))
        for name in ("rollout_s", "tokens"):
            curves[name] = curves.get(name, 0.0) + more.curves.get(name, 0.0)
        useful = _groups(more, with_spread=True)
        samples = _replaced(samples, flat, more, useful)
        resampled += min(len(flat), len(useful))
    if supply.resample_rounds:
        curves["resampled"] = float(resampled)
        if curves.get("rollout_s"):
            curves["tokens_per_s"] = curves["tokens"] / curves["rollout_s"]
    return replace(samples, curves=curves)


def _groups(samples: Samples, *, with_spread: bool) -> list[int]:
    spread = groups_with_spread(samples.rewards, samples.group_size, counts=samples.counts)
    chosen: list[int] = (spread == with_spread).nonzero().flatten().tolist()
    return chosen


def _replaced(samples: Samples, flat: Sequence[int], more: Samples, useful: Sequence[int]) -> Samples:
    """`samples` with as many of its groups `flat` replaced as `more` has `useful` ones, each in its place."""
    size, kept = samples.group_size, list[Sample](samples.samples)
    for old, new in zip(flat, useful, strict=False):
        kept[old * size : (old + 1) * size] = more.groups([new])
    return replace(samples, samples=kept)
