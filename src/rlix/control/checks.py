"""Checks what callers of the scheduler service say, before any of it is kept.

What is recorded must be readable by the control plane that comes after a restart, what is kept beside it is looked at
every second, and the planner reckons with it: one wrong type, or a number out of all proportion, would stop them for
everybody.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import astuple
from typing import TypeGuard

from rlix.control.core import Core
from rlix.control.gang_queue import Asked
from rlix.control.job import Job
from rlix.control.registration import job_name
from rlix.protocol.errors import PipelineGoneError, RlixError, SpecError, StaleEpochError
from rlix.protocol.messages import (
    LARGEST_COUNT,
    MOST_METRICS,
    MOST_SECONDS,
    MOST_WAIT_S,
    Demand,
    Lease,
    LeaseState,
    Process,
    Progress,
    Registration,
)
from rlix.protocol.types import Phase

LEAST, MOST = 1e-9, MOST_SECONDS  # of numbers that are not counted: seconds, trajectories at once
MOST_MEMBERS = 100_000
LONGEST_TEXT = 10_000
LONGEST_KIND = 64


def kind(value: object) -> None:
    """Raises SpecError unless an id, which is part of an actor's name, may begin so."""
    if not isinstance(value, str) or not value.isidentifier() or len(value) > LONGEST_KIND:
        raise SpecError(f"allocate_pipeline_id: kind must be a word such as 'ft' or 'lora', got {value!r:.80}")


def registration(core: Core, pipeline_id: str) -> Registration:
    """What the pipeline registered. Raises PipelineGoneError unless there is one of that id."""
    found = core.state.registrations.get(pipeline_id)
    if found is None:
        why = core.known.log.why_ended(pipeline_id)
        text = f"pipeline {pipeline_id!r:.80} is not registered (any more)"
        raise PipelineGoneError(f"{text}: {why}" if why else text)
    return found


def job(core: Core, pipeline_id: str) -> Job:
    """The job of the pipeline. Raises PipelineGoneError unless it is admitted and not on its way out."""
    registration(core, pipeline_id)
    found = core.known.jobs.get(pipeline_id)
    if found is None:
        raise PipelineGoneError(f"pipeline {pipeline_id!r} is not admitted; call admit_pipeline first")
    if found.ending is not None:
        why = core.state.ending.get(pipeline_id, "")
        raise PipelineGoneError(f"pipeline {pipeline_id!r} is being ended{f': {why}' if why else ''}")
    return found


def not_drained(core: Core, pipeline_id: str, cluster: str) -> None:
    """Raises RlixError when a rollout waits for bundles of drained hosts, others are in service, and its pipeline holds
    nothing. The pipeline is not gone: whoever feeds the rollout must not take this for its end."""
    if core.known.drained(pipeline_id, core.state.registrations[pipeline_id].cluster(cluster)):
        raise RlixError(f"{name(core, pipeline_id)}: the hosts of all devices of its {cluster} are drained")


def name(core: Core, pipeline_id: str) -> str:
    """How messages about what a registered pipeline says begin."""
    return job_name(core.state.registrations[pipeline_id])


def process(where: str, value: object, *, optional: bool = False) -> None:
    """Raises SpecError unless it names a process."""
    if optional and value is None:
        return
    if not (
        isinstance(value, Process)
        and _is_text(value.node_id)
        and _is_count(value.pid)
        and _is_count(value.started)
        and _is_text(value.name)
    ):
        raise SpecError(f"{where}: needs a Process (rlix.node.process.this_process), got {value!r:.80}")


def holders(where: str, value: object) -> None:
    """Raises SpecError unless it gives a process for each of some ranks."""
    if not isinstance(value, Mapping) or len(value) > MOST_MEMBERS or not all(_is_count(rank) for rank in value):
        raise SpecError(f"{where}: needs the processes by rank, as {{0: Process(...)}}, got {value!r:.80}")
    for each in value.values():
        process(where, each)


def epochs(where: str, value: object) -> None:
    """Raises SpecError unless they are leases' epochs."""
    if not _are_counts(value):
        raise SpecError(f"{where}: needs the epochs of leases, got {value!r:.80}")


def held(core: Core, pipeline_id: str, epochs: Sequence[int]) -> tuple[list[Lease], StaleEpochError | None]:
    """The leases with these epochs that the pipeline holds, and what is to be said if it holds some of them not.

    What it has given back already may be given back again: the answer may have been lost with a scheduler.
    """
    found = {s.lease.epoch: s.lease for s in core.state.leases_of(pipeline_id) if s.lease.epoch in epochs}
    lacking = [e for e in epochs if e not in found and not core.known.log.gave_back(pipeline_id, e)]
    return list(found.values()), _stale(core, pipeline_id, lacking) if lacking else None


def active(core: Core, pipeline_id: str, epoch: int) -> Lease:
    """The lease as it is now. Raises StaleEpochError unless the pipeline holds it, and it does not end."""
    status = core.state.leases.get(epoch)
    if status is None or status.lease.pipeline_id != pipeline_id or status.state is not LeaseState.ACTIVE:
        raise _stale(core, pipeline_id, (epoch,))
    return status.lease


def _stale(core: Core, pipeline_id: str, epochs: Sequence[int]) -> StaleEpochError:
    names = [f"{e} ({why})" if (why := core.why(e)) else str(e) for e in epochs]
    return StaleEpochError(f"lease {', '.join(names)} is not held by {pipeline_id!r} (any more)")


def part(where: str, lease: Lease, devices: object) -> None:
    """Raises SpecError unless the lease is a gang's and keeps some of its devices when these are given back."""
    if not isinstance(devices, Sequence | Set) or not _are_counts(devices):
        raise SpecError(f"{where}: needs the ids of devices, got {devices!r:.80}")
    if lease.phase is Phase.ROLLOUT:
        raise SpecError(f"{where}: lease {lease.epoch} is a rollout's: its bundle is released as a whole")
    if set(lease.devices) <= set(devices):
        raise SpecError(f"{where}: lease {lease.epoch} has no other devices than {list(lease.devices)}: release it")


def wait(where: str, value: object) -> None:
    """Raises SpecError unless one question may wait so many seconds for its answer."""
    if not _is_seconds(value) or value > MOST_WAIT_S:
        raise SpecError(f"{where}: wait_s must be seconds from 0 to {MOST_WAIT_S:g}, got {value!r:.80}")


def text(where: str, field: str, value: object) -> None:
    """Raises SpecError unless it is a text that can be written down."""
    if not _is_text(value):
        raise SpecError(f"{where}: {field} must be a text of at most {LONGEST_TEXT} characters, got {value!a:.100}")


def asked(where: str, value: object) -> None:
    """Raises SpecError unless a gang may be asked for so."""
    if not isinstance(value, Asked):
        raise SpecError(f"{where}: needs an Asked, got {value!r:.80}")
    text(where, "key", value.key)
    process(where, value.holder, optional=True)
    epochs(where, value.holding)
    epochs(where, value.giving)
    for devices in (value.devices, value.home):
        if not isinstance(devices, tuple) or not _are_counts(devices):
            raise SpecError(f"{where}: needs a tuple of device ids, got {devices!r:.80}")
    if not _is_seconds(value.move_s):
        raise SpecError(f"{where}: move_s must be seconds from 0 to {MOST:g}, got {value.move_s!r:.80}")
    for field, limit in (("timeout_s", value.timeout_s), ("longest_s", value.longest_s)):
        if limit is not None and not (_is_seconds(limit) and limit > 0):
            raise SpecError(f"{where}: {field} must be seconds above 0, at most {MOST:g}, or None, got {limit!r:.80}")


def demand(where: str, value: object) -> None:
    """Raises SpecError unless it is a demand of numbers that can be reckoned with."""
    if not isinstance(value, Demand) or not (_is_count(value.trajectories) and _is_count(value.tokens)):
        raise SpecError(
            f"{where}: a demand needs whole numbers of trajectories and tokens from 0 up, got {value!a:.200}"
        )
    if not all(number == 0 or (_is_seconds(number) and number >= LEAST) for number in astuple(value)):
        raise SpecError(f"{where}: numbers of a demand are 0 or from {LEAST:g} to {MOST:g}, got {value!a:.200}")


def progress(where: str, value: object) -> None:
    """Raises SpecError unless it is a progress with a bounded number of finite metrics."""
    if not isinstance(value, Progress) or not (_is_count(value.step) and _is_count(value.steps)):
        raise SpecError(f"{where}: a progress needs whole numbers of steps from 0 up, got {value!a:.200}")
    numbers = value.metrics if isinstance(value.metrics, Mapping) and len(value.metrics) <= MOST_METRICS else {"": None}
    for name, number in numbers.items():
        text(where, "the name of a metric", name)
        if name and not name.isprintable():
            raise SpecError(f"{where}: the name of a metric must be printable, got {name!a:.100}")
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise SpecError(f"{where}: at most {MOST_METRICS} metrics, finite numbers, got {name!a}: {number!a:.100}")


def _are_counts(value: object) -> bool:
    return isinstance(value, Sequence | Set) and len(value) <= MOST_MEMBERS and all(_is_count(each) for each in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def _is_seconds(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
