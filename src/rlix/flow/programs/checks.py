"""What a user of a flow may get wrong, found before anybody starts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rlix.control.registration import check_gang_request
from rlix.flow.planner import Mode, Plan
from rlix.flow.profiler.profile import Profile
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device
from rlix.protocol.types import LONGEST_NAME, NAME, Phase

if TYPE_CHECKING:
    from rlix.control.program import Program

T = TypeVar("T")


def check_name(what: str, name: object) -> None:
    """Raises SpecError: it is no name as jobs have them; it becomes that of a file and of workers."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise SpecError(
            f"a {what}'s name is 1 to {LONGEST_NAME} letters, digits, '.', '_' and '-', of which the first is a letter "
            f"or a digit, not {name!r}"
        )


def all_of(kind: type[T], values: object, where: str) -> tuple[T, ...]:
    """Raises SpecError: they are not so many of a kind."""
    if not isinstance(values, Iterable):
        raise SpecError(f"{where} is a list of {kind.__name__}, not {values!r}")
    found = tuple(values)
    if wrong := [value for value in found if not isinstance(value, kind)]:
        raise SpecError(f"{where} is a list of {kind.__name__}, and {wrong[0]!r} is none")
    return found


def check_items(flow: str, items: object) -> None:
    """Raises SpecError: they are no sequence whose elements are items, as a list or an array."""
    length = hasattr(items, "__len__") and hasattr(items, "__getitem__")
    if not length or isinstance(items, str | bytes | Mapping):
        raise SpecError(f"{flow}: a step takes a sequence of items, such as a list, not {type(items).__name__}")


def wanted_plan(flow: str, plan: object, profile: object) -> Plan | Mode | None:
    """A plan, a mode, or None: the fastest. Raises SpecError: it is none of them, or there is nothing to plan by."""
    wanted = check_plan_name(flow, plan)
    if not isinstance(plan, Plan) and not isinstance(profile, Profile):
        raise SpecError(
            f"flow {flow}: plan={plan!s} needs a Profile, not {profile!r}: `rlix.flow.profile` measures one, and "
            "Profile.read(path) reads what `rlix profile` kept"
        )
    return wanted


def check_plan_name(flow: str, plan: object) -> Plan | Mode | None:
    """A plan, a mode, or None: the fastest. Raises SpecError: it is none of them."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str) or plan not in {"auto", *Mode}:
        raise SpecError(f"flow {flow}: plan={plan!r} must be auto, {', '.join(Mode)}, or a plan")
    return None if plan == "auto" else Mode(plan)


def check_gang(flow: str, devices: Sequence[Device], job: "Program | None", cluster: str | None) -> None:
    """Raises SpecError: there are no devices, or they are not those of the job's gang."""
    if not all_of(Device, devices, f"flow {flow}: devices (`client.devices()` of a job has them, by their numbers)"):
        raise SpecError(f"flow {flow}: devices is empty, and a flow needs one or more")
    if (job is None) != (cluster is None):
        raise SpecError(f"flow {flow}: `job` and `cluster`, its gang of these devices, go together")
    if job is not None:
        ids = tuple(device.id for device in devices)
        check_gang_request(job.client.registration(), cluster, Phase.ACTOR_TRAINING, ids)


def check_part_call(name: str, worker: type[Any], method: object, kwargs: object) -> None:
    """Raises SpecError: the worker has no such method, or these are no arguments by name."""
    if not isinstance(method, str):
        raise SpecError(f"{name}: the method is given by its name, such as {_named(method)!r}, not {method!r}")
    own = any(method in base.__dict__ for base in worker.__mro__)  # and not of classes, as `mro` is
    if method.startswith("__") or not own or not callable(getattr(worker, method)):
        raise SpecError(f"{name}: {worker.__name__} has no method {method!r}")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise SpecError(f"{name}: kwargs is a dict of {worker.__name__}'s arguments by name, not {kwargs!r}")


def _named(method: object) -> str:
    return str(getattr(method, "__name__", "run"))
