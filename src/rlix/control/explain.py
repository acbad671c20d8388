"""What a gang request waits for, and who is in the way: for people."""

from collections.abc import Sequence
from itertools import takewhile

from rlix.control.gang_queue import Ticket
from rlix.scheduler.known import Known
from rlix.scheduler.snapshot import GangRequest


def choices(state: Known, ticket: Ticket) -> tuple[tuple[int, ...], ...]:
    """The sets of devices of which a request waits for one."""
    granted = None if ticket.epoch is None else state.answered_by(ticket.epoch)
    return (state.requests.get(ticket.request_id) or granted or ticket.cluster).choices


def can_run(state: Known, ticket: Ticket) -> bool:
    """Whether one of its choices is in the pool."""
    return any(all(state.device(d) is not None for d in choice) for choice in choices(state, ticket))


def wanted(state: Known, ticket: Ticket) -> str:
    return " or ".join(str(list(devices)) for devices in choices(state, ticket))


def left(state: Known, ticket: Ticket) -> str:
    what = f"{ticket.pipeline_id}/{ticket.cluster.name}"
    drained = any(state.on_draining(devices) for devices in choices(state, ticket))
    why = "left the pool because their host is drained" if drained else "left the pool with their node"
    return f"{what} asks for devices that {why}: {wanted(state, ticket)}"


def behind(state: Known, ticket: Ticket, order: Sequence[GangRequest], stuck: str = "") -> str:
    """Who is in the way of a request. `order`: in which requests are served. `stuck`: why nothing is granted."""
    devices = set().union(*choices(state, ticket))
    on = (state.holder(device) for device in devices)
    epochs = {*on, *state.successors(devices)} - {None, ticket.epoch}
    held = [
        f"{s.lease.pipeline_id}/{s.lease.cluster} ({s.lease.phase.name}, {s.state}) holds {sorted(common)}"
        for epoch in sorted(epoch for epoch in epochs if epoch is not None)
        if (s := state.leases[epoch]) and (common := devices.intersection(s.lease.devices))
    ]
    before = takewhile(lambda r: r.id != ticket.request_id, order if ticket.request_id in state.requests else ())
    ahead = [
        f"{r.pipeline_id}/{r.cluster} ({r.phase.name}) waits in front of it"
        for r in before
        if devices.intersection(r.devices)
    ]
    return "; ".join(held + ahead + ([stuck] if stuck else [])) or "nobody holds them: the scheduler did not come to it"
