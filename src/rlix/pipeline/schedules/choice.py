"""From the schedule that a job names to the object."""

from rlix.pipeline.schedules.ahead import Ahead
from rlix.pipeline.schedules.base import Schedule, Supply
from rlix.pipeline.schedules.on_policy import OnPolicy
from rlix.pipeline.spec.named import import_object, parse_options
from rlix.pipeline.spec.schedule import ScheduleSpec
from rlix.protocol.errors import SpecError

CLASSES: dict[str, type[Schedule]] = {"on_policy": OnPolicy, "ahead": Ahead}


def build_schedule(spec: ScheduleSpec, supply: Supply) -> Schedule:
    """Raises SpecError when what the job names is no schedule."""
    found = CLASSES.get(spec.name) or import_object(spec.name)
    if not (isinstance(found, type) and issubclass(found, Schedule)):
        raise SpecError(f"schedule.name: {spec.name!r} is not a subclass of rlix.pipeline.schedules.Schedule")
    return found(parse_options(found, spec.options) if found.Options is not None else spec.options, supply)
