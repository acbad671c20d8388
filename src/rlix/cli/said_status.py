"""`rlix status --json`: what the control plane says of itself, as data."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlix.cli.answers import DeviceAnswer, EndingAnswer, JobAnswer, LeaseAnswer, StatusAnswer, WaitAnswer
from rlix.cli.hosts import hosts_of
from rlix.pipeline.jobs.handle import JobHandle
from rlix.protocol.messages import ControlStatus, NodeStatus, PipelineStatus

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus


def job_answer(status: "JobStatus", run_dir: Path | None) -> JobAnswer:
    return JobAnswer(
        name=status.name,
        pipeline_id=status.pipeline_id,
        state=status.state,
        phase=status.phase,
        step=status.step,
        steps=status.steps,
        error=status.error or "",
        run_dir=None if run_dir is None else str(run_dir),
        resumes=status.resumes,
        reward=status.reward,
        tokens_per_s=status.tokens_per_s,
        staleness=status.staleness,
    )


def status_answer(
    said: str,
    jobs: Sequence[JobHandle],
    programs: Sequence[PipelineStatus],
    control: ControlStatus,
    hosts: Sequence[NodeStatus],
) -> StatusAnswer:
    attached = (
        JobAnswer(
            name=p.name or p.pipeline_id,
            pipeline_id=p.pipeline_id,
            state="ending" if p.ending else "attached",
            error=p.ending,
            step=p.progress.step if p.progress else 0,
            steps=p.progress.steps if p.progress else 0,
            metrics=dict(p.progress.metrics) if p.progress else {},
        )
        for p in programs
    )
    return StatusAnswer(
        running=True,
        said=said,
        jobs=(*(job_answer(job.known, job.run_dir) for job in jobs), *attached),
        devices=tuple(DeviceAnswer(id=d.id, address=d.node_ip, kind=d.kind) for d in control.devices),
        leases=tuple(
            LeaseAnswer(
                epoch=each.lease.epoch,
                pipeline_id=each.lease.pipeline_id,
                cluster=each.lease.cluster,
                phase=each.lease.phase.name.lower(),
                devices=each.lease.devices,
                state=each.state,
                since=control.granted_at.get(each.lease.epoch),
                reason=each.reason,
            )
            for each in control.leases
        ),
        waiting=tuple(
            WaitAnswer(
                pipeline_id=w.pipeline_id, cluster=w.cluster, phase=w.phase.name.lower(), since=w.since, behind=w.behind
            )
            for w in control.waiting
        ),
        hosts=hosts_of(hosts),
        endings=tuple(
            EndingAnswer(
                time=e.time, pipeline_id=e.pipeline_id, job=e.job, cluster=e.cluster, devices=e.devices, why=e.why
            )
            for e in control.endings
        ),
        trouble=control.trouble,
    )
