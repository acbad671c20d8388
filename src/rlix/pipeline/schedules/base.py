"""What a schedule is: it asks a source for samples and says when rollouts get new weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlix.engine.weights.publication import Published
from rlix.pipeline.samples import Samples
from rlix.pipeline.sources.base import Source


@dataclass(frozen=True, slots=True)
class Supply:
    """What a schedule works with.

    Args:
        publish: rollouts generate with these weights from now on.
        steps: of the whole job.
    """

    source: Source
    publish: Callable[[Published], None]
    steps: int


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
