"""What a gang request waits for, and who is in the way: for people."""

from collections.abc import Iterable, Sequence

from rlix.control.gang_queue import Ticket
from rlix.scheduler.known import Known
from rlix.scheduler.snapshot import GangRequest


def choices(state: Known, ticket: Ticket) -> tuple[tuple[int, ...], ...]:
    """The sets of devices of which a request waits for one."""
    granted = None if ticket.epoch is None else state.answered_by(ticket.epoch)
    return (state.requests.get(ticket.request_id) or granted or ticket.cluster).choices


def can_run(state: Known, ticket: Ticket) -> bool:
    """Whether one of its choices is in the pool, or may be again while no other host is in service."""
    waits = state.out_of_service
    return any(
        all(state.is_discovered(d) if waits else state.device(d) is not None for d in choice)
        for choice in choices(state, ticket)
    )


def wanted(state: Known, ticket: Ticket) -> str:
    return " or ".join(str(list(devices)) for devices in choices(state, ticket))


def left(state: Known, ticket: Ticket) -> str:
    what = f"{ticket.pipeline_id}/{ticket.cluster.name}"
    drained = any(state.on_draining(devices) for devices in choices(state, ticket))
    why = "left the pool because their host is drained" if drained else "left the pool with their node"
    return f"{what} asks for devices that {why}: {wanted(state, ticket)}"


class Line:
    """The requests in the order in which they are served, to be asked by many of them who is in front."""

    def __init__(self, order: Sequence[GangRequest]) -> None:
        self._order = order
        self._place = {request.id: place for place, request in enumerate(order)}
        self._on: dict[int, list[int]] = {}  # device -> places of those that want it first of all
        for place, request in enumerate(order):
            for device in request.devices:
                self._on.setdefault(device, []).append(place)

    def before(self, request_id: int, devices: Iterable[int]) -> list[GangRequest]:
        """Those in front of a request that want any of these devices first of all; none of one that does not wait."""
        mine = self._place.get(request_id, 0)
        places = {place for device in devices for place in self._on.get(device, ()) if place < mine}
        return [self._order[place] for place in sorted(places)]


def behind(state: Known, ticket: Ticket, line: Line, stuck: str = "") -> str:
    """Who is in the way of a request. `stuck`: why nothing is granted."""
    devices = set().union(*choices(state, ticket))
    on = (state.holder(device) for device in devices)
    epochs = {*on, *state.successors(devices)} - {None, ticket.epoch}
    held = [
        f"{s.lease.pipeline_id}/{s.lease.cluster} ({s.lease.phase.name}, {s.state}) holds {sorted(common)}"
        for epoch in sorted(epoch for epoch in epochs if epoch is not None)
        if (s := state.leases[epoch]) and (common := devices.intersection(s.lease.devices))
    ]
    ahead = [
        f"{r.pipeline_id}/{r.cluster} ({r.phase.name}) waits in front of it"
        for r in line.before(ticket.request_id, devices)
    ]
    drained = ["every host is drained"] if state.out_of_service else []
    reasons = held + ahead + drained + ([stuck] if stuck else [])
    return "; ".join(reasons) or "nobody holds them: the scheduler did not come to it"
