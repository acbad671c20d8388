"""Making the next steps' samples while a step trains, under a bound on the age of their tokens."""

import logging
import time
from dataclasses import replace
from typing import Any

from rlix.engine.weights.publication import Published
from rlix.pipeline.samples import Samples
from rlix.pipeline.schedules.base import Schedule, Supply
from rlix.pipeline.spec.schedule import AheadOptions
from rlix.protocol.errors import RlixError

logger = logging.getLogger(__name__)


class StalenessError(RlixError):
    """A token is older than the job's bound allows. Always a bug: nothing is started that could become too old."""


class Ahead(Schedule):
    """While step k trains, what the steps up to k + `ahead` learn from is generated.

    Every token knows the version of the weights that produced it, and is checked against `max_staleness` when it is
    trained on. With `in_flight: finish` a step's samples come from one version, so that a run is as reproducible as an
    on-policy one.
    """

    Options = AheadOptions
    options: AheadOptions

    def __init__(self, options: AheadOptions, supply: Supply) -> None:
        super().__init__(options, supply)
        self._begun: dict[int, Any] = {}
        self._made: dict[int, Samples] = {}
        self._held_back: Published | None = None
        self._said = False  # that everything is dropped

    def samples(self, step: int) -> Samples:
        """What an earlier step has usually begun; begins the next."""
        if step not in self._begun and step not in self._made:
            self._begin(step)
        samples = self._made.pop(step) if step in self._made else self._finished(step)
        self._begin_ahead(step)
        samples, dropped = checked(step, samples, self.options)
        if dropped == len(samples) and not self._said:
            self._said = True
            logger.warning(
                "step %d teaches nothing: each of its %d samples has a token older than max_staleness %d; lower "
                "schedule.options.ahead, or use 'on_stale: rescore' (the metric dropped shows when it happens again)",
                step,
                len(samples),
                self.options.max_staleness,
            )
        return replace(samples, curves={**samples.curves, "dropped": float(dropped)})

    def publish(self, weights: Published) -> None:
        """At once, or when what is in flight is finished."""
        if self.options.in_flight == "finish" and self._begun:
            self._held_back = weights
        else:
            super().publish(weights)

    def settle(self) -> None:
        """What is in flight is finished with the weights it began with, as it would be without this."""
        if self._held_back is None:
            return
        for step in list(self._begun):
            self._made[step] = self._finished(step)
        super().publish(self._held_back)
        self._held_back = None

    def _finished(self, step: int) -> Samples:
        start = time.time()
        samples = self.supply.source.finish(self._begun[step])
        waited = time.time() - start
        del self._begun[step]
        return replace(samples, curves={**samples.curves, "rollout_wait_s": waited})

    def _begin_ahead(self, step: int) -> None:
        """Start what may be generated while `step` trains."""
        if self._held_back is not None:
            super().publish(self._held_back)
            self._held_back = None
        for later in range(step + 1, min(step + self.options.steps_ahead, self.supply.steps - 1) + 1):
            if later not in self._begun and later not in self._made:
                self._begin(later)

    def _begin(self, step: int) -> None:
        self._begun[step] = self.supply.source.begin(step)


def checked(step: int, samples: Samples, rule: AheadOptions) -> tuple[Samples, int]:
    """`samples` under the staleness bound: with `drop` those that are too old do not count, with `rescore` their old
    tokens are marked; and how many were dropped.

    Raises:
        StalenessError: with `on_stale: wait`, a token is older than `max_staleness`.
    """
    ages = {s.id: [step - version for version in s.versions] if s.counts else [] for s in samples.samples}
    oldest = max((age for of_one in ages.values() for age in of_one), default=0)
    if oldest > rule.max_staleness and rule.on_stale == "wait":
        raise StalenessError(f"step {step}: a token is {oldest} steps old, the bound is {rule.max_staleness}")
    stale = {id: [age > rule.max_staleness for age in of_one] for id, of_one in ages.items()}
    too_old = {id for id, of_one in stale.items() if any(of_one)}
    if rule.on_stale == "drop":
        kept = [replace(s, counts=False) if s.id in too_old else s for s in samples.samples]
        return replace(samples, samples=kept), len(too_old)
    return replace(samples, stale={id: stale[id] for id in too_old}), 0
