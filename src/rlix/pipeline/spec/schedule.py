"""When a job's samples are made."""

from typing import Literal

from rlix.pipeline.spec.named import Named
from rlix.pipeline.spec.section import Count, Section


class OnPolicyOptions(Section):
    """A step's samples are made by the policy that it trains."""


class AheadOptions(Section):
    """The next steps' samples are made while a step trains, under a bound on the age of their tokens."""

    max_staleness: Count = 1
    """Oldest a token may be when it is trained on: steps that the policy has taken since the weights that produced
    it."""
    ahead: Count | None = None
    """How many steps beyond the one that trains may be generated; null: `max_staleness`."""
    on_stale: Literal["wait", "drop", "rescore"] = "wait"
    """wait: never run further ahead than the bound. drop: leave a sample with an older token out of the update.
    rescore: keep it, with its older tokens scored as if the policy that trains had produced them."""
    in_flight: Literal["continue", "finish"] = "continue"
    """What new weights do to samples that are being generated: they go on with them, or finish without them."""

    @property
    def steps_ahead(self) -> int:
        return self.ahead or self.max_staleness


SCHEDULES: dict[str, type[Section]] = {"on_policy": OnPolicyOptions, "ahead": AheadOptions}
"""The options of the schedules that ship; `rlix.pipeline.schedules` has their classes."""


class ScheduleSpec(Named):
    """When samples are made."""

    name: str = "on_policy"
    """`on_policy`, `ahead`, or your own: `file.py:Class`."""

    @property
    def works_ahead(self) -> bool:
        """Whether it lets the next step's samples be made while a step trains."""
        return self.name == "ahead"
