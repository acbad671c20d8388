"""What the control plane shows of itself."""

import pickle
from dataclasses import replace

from rlix.control.core import Core
from rlix.control.explain import Line, behind, choices
from rlix.protocol.messages import Cluster, ControlStatus, Demand, Device, LeaseState, PipelineStatus, Waiting
from rlix.scheduler.gang_order import gang_order

_Steady = tuple[tuple[Device, ...], tuple[tuple[Cluster, ...], ...]]


def status_of(core: Core) -> ControlStatus:
    """Everything that a terminal view shows."""
    known, state = core.known, core.state
    since = known.wall() - core.clock.time()
    trouble = core.trouble
    line = Line(gang_order(state.snapshot(core.clock.time())))
    waiting = tuple(
        Waiting(
            ticket.pipeline_id,
            ticket.cluster.name,
            ticket.phase,
            since + ticket.asked_at,
            behind(state, ticket, line, trouble),
            choices(state, ticket),
        )
        for ticket in known.gangs.waiting()
    )
    of_pipeline: dict[str, list[str]] = {}
    for each in waiting:
        of_pipeline.setdefault(each.pipeline_id, []).append(each.cluster)
    demands = {pipeline_id: demand for (pipeline_id, _), demand in state.demands.items()}
    pipelines = tuple(
        PipelineStatus(
            pipeline_id=pipeline_id,
            clusters=registration.clusters,
            waiting=tuple(of_pipeline.get(pipeline_id, ())),
            demand=demands.get(pipeline_id, Demand(0)),
            name=registration.name,
            ending=state.ending.get(pipeline_id, ""),
            progress=known.jobs[pipeline_id].progress if pipeline_id in known.jobs else None,
            deaf=tuple(sorted(known.jobs[pipeline_id].deaf)) if pipeline_id in known.jobs else (),
        )
        for pipeline_id, registration in state.registrations.items()
    )
    held = [status.lease for status in state.leases.values() if status.state is not LeaseState.PENDING]
    return ControlStatus(
        devices=state.devices,
        pipelines=pipelines,
        leases=tuple(state.leases.values()),
        waiting=waiting,
        granted_at=dict(known.granted_at),
        holders={lease.epoch: known.holders(lease) for lease in held},
        trouble=trouble,
        endings=tuple(known.endings),
        draining={node_id: node_id[:8] for node_id in state.draining},  # by name: see the orchestrator
        cordoned=frozenset(state.cordoned),
        plans=core.planning.turns,
        plan_s=core.planning.turns_s,
    )


class Packer:
    """Makes bytes of a status. What a large pool's status mostly consists of, devices and who may use which, changes
    rarely, and the scheduler's loop does not pickle it each time anew."""

    def __init__(self) -> None:
        self._steady: _Steady = ((), ())
        self._packed = pickle.dumps(self._steady)

    def pack(self, status: ControlStatus) -> tuple[bytes, bytes]:
        """Its devices and clusters, and all the rest."""
        steady = status.devices, tuple(pipeline.clusters for pipeline in status.pipelines)
        if steady != self._steady:
            self._steady, self._packed = steady, pickle.dumps(steady)
        pipelines = tuple(replace(pipeline, clusters=()) for pipeline in status.pipelines)
        return self._packed, pickle.dumps(replace(status, devices=(), pipelines=pipelines))


def unpacked(steady: bytes, rest: bytes) -> ControlStatus:
    """The status that was packed; only for what a `Packer` of this pool has made."""
    status: ControlStatus = pickle.loads(rest)
    devices, clusters = pickle.loads(steady)
    pipelines = tuple(replace(p, clusters=c) for p, c in zip(status.pipelines, clusters, strict=True))
    return replace(status, devices=devices, pipelines=pipelines)
