"""The shortest sequence of events that makes up a state: what a compacted journal holds."""

from collections.abc import Iterator

from rlix.protocol.events import (
    CountersKept,
    DevicesDiscovered,
    Event,
    GangRequested,
    HoldersNamed,
    LeaseKept,
    NodesCordoned,
    PipelineAdmitted,
    PipelineAllocated,
    PipelineEnding,
    PipelineRegistered,
)
from rlix.protocol.types import LAUNCHER
from rlix.scheduler.snapshot import GangRequest
from rlix.scheduler.state import State


def image(state: State, now: float) -> tuple[Event, ...]:
    """Events that, applied to a new state, make it equal to this one in all but what is learnt again.

    That is demand, which jobs report, how long gangs take, and where one last was that does not hold all of it now.
    `now`: seconds on the clock of the state's events.
    """
    return tuple(_events(state, now))


def _events(state: State, now: float) -> Iterator[Event]:
    yield DevicesDiscovered(state.discovered, tuple(sorted(state.draining)))
    if state.cordoned:
        yield NodesCordoned(state.cordoned)
    for pipeline_id, kind in state.allocated.items():
        yield PipelineAllocated(pipeline_id, kind)
    for pipeline_id, registration in state.registrations.items():
        yield PipelineRegistered(registration)
        for cluster in ("", LAUNCHER, *(cluster.name for cluster in registration.clusters)):
            if holders := state.holders(pipeline_id, cluster):
                yield HoldersNamed(pipeline_id, cluster, tuple(holders.items()))
        if pipeline_id in state.admitted or pipeline_id in state.ending:
            yield PipelineAdmitted(pipeline_id)
    for epoch, status in state.leases.items():
        answered = state.answered_by(epoch)
        yield LeaseKept(status, None if answered is None else _asked(answered, now))
    for request in sorted(state.requests.values(), key=lambda request: request.id):
        yield _asked(request, now)
    for pipeline_id, reason in state.ending.items():
        yield PipelineEnding(pipeline_id, reason, state.spared.get(pipeline_id))
    yield CountersKept(
        state.next_epoch - 1, state.next_request_id - 1, state.next_device_id - 1, state.next_pipeline - 1
    )


def _asked(request: GangRequest, now: float) -> GangRequested:
    return GangRequested(
        request.id,
        request.pipeline_id,
        request.cluster,
        request.phase,
        request.key,
        request.holder,
        request.holding,
        request.longest_s,
        request.devices,
        request.exact,
        request.until,
        request.move_s,
        max(0.0, now - request.asked_at),
    )
