"""What the control plane shows of itself."""

from rlix.control.core import Core
from rlix.protocol.messages import ControlStatus, Demand, LeaseState, PipelineStatus, Waiting


def status_of(core: Core) -> ControlStatus:
    """Everything that a terminal view shows."""
    state, now, wall = core.state, core.clock.time(), core.wall()
    waiting = tuple(
        Waiting(
            ticket.pipeline_id,
            ticket.cluster.name,
            ticket.phase,
            wall - (now - ticket.asked_at),
            core.behind(ticket),
            core.choices(ticket),
        )
        for ticket in core.gangs.waiting()
    )
    demands = {pipeline_id: demand for (pipeline_id, _), demand in state.demands.items()}
    pipelines = tuple(
        PipelineStatus(
            pipeline_id=pipeline_id,
            admitted=pipeline_id in state.admitted,
            clusters=registration.clusters,
            waiting=tuple(w.cluster for w in waiting if w.pipeline_id == pipeline_id),
            demand=demands.get(pipeline_id, Demand(0)),
            name=registration.name,
            ending=state.ending.get(pipeline_id, ""),
        )
        for pipeline_id, registration in state.registrations.items()
    )
    held = [status.lease for status in state.leases.values() if status.state is not LeaseState.PENDING]
    return ControlStatus(
        devices=state.devices,
        pipelines=pipelines,
        leases=tuple(state.leases.values()),
        journal_length=len(core.writer),
        waiting=waiting,
        granted_at=dict(core.granted_at),
        holders={lease.epoch: core.endings.holders(lease) for lease in held},
        trouble=core.writer.trouble,
        endings=tuple(core.endings.last),
    )
