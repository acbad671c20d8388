"""Worker groups by hand: a placement is text, or lists of numbers of devices."""

from collections.abc import Sequence
from typing import Any

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device
from rlix.workers.counts import check_count
from rlix.workers.group import WorkerGroup
from rlix.workers.placement import Placement, place
from rlix.workers.worker import Worker

DEFAULT_TIMEOUT_S = 600.0


def launch(
    worker_cls: type[Worker],
    placement: Placement,
    devices: Sequence[Device],
    *,
    name: str | None = None,
    **options: Any,
) -> WorkerGroup:
    """A group of `worker_cls` where `placement` says; `options` are those of `WorkerGroup`.

    Args:
        placement: a list of each rank's devices (`[]`: none), or text, with a rank on each: `"all"`, `"0-3"`,
            `"0-1:0-7"` (nodes before the colon).
        name: default: the class's. Of this group alone, among those of a program that there are at a time.

    Raises what `place` and `WorkerGroup` raise.
    """
    if not (isinstance(worker_cls, type) and issubclass(worker_cls, Worker)):
        raise SpecError(f"{worker_cls!r} is not a class derived from rlix.flow.Worker")
    if name is not None and not isinstance(name, str):
        raise SpecError(f"launch: the name of a group is text, not {name!r}")
    check_count("launch: max_concurrency", options.get("max_concurrency", 1))
    return WorkerGroup(worker_cls, name=name or worker_cls.__name__, placements=place(placement, devices), **options)
