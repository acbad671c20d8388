"""From the schedule that a job names to the object."""

from rlix.pipeline.schedules.ahead import Ahead
from rlix.pipeline.schedules.base import Schedule, Supply
from rlix.pipeline.schedules.on_policy import OnPolicy
from rlix.pipeline.spec.named import import_class, options_of
from rlix.pipeline.spec.schedule import ScheduleSpec

CLASSES: dict[str, type[Schedule]] = {"on_policy": OnPolicy, "ahead": Ahead}


def build_schedule(spec: ScheduleSpec, supply: Supply) -> Schedule:
    """Raises SpecError when what the job names is no schedule."""
    found: type[Schedule] = CLASSES.get(spec.name) or import_class("schedule", spec.name)
    return found(options_of(found, spec.options), supply)
