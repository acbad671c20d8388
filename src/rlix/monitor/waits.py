"""Who waits, since when, for what, and on whose lease: sentences for people."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlix.protocol.messages import Cluster, ControlStatus, LeaseState, LeaseStatus, PipelineStatus


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that a job waits for. `reasons`: who has it, or is in front. `since`: unix seconds, where known."""

    pipeline_id: str
    job: str
    cluster: str
    what: str
    reasons: tuple[str, ...]
    since: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Names the wait for as long as it is the same one."""
        return self.pipeline_id, self.cluster

    def sentence(self, since: str | None = None) -> str:
        """ "sort waits since 0:01:10 for devices 0–1 (actor train): copy holds 0 for rollout, giving way"."""
        when = f" since {since}" if since else ""
        return f"{self.job} waits{when} for {self.what}: {'; '.join(self.reasons)}"


def waits(control: ControlStatus, called: Mapping[str, str]) -> tuple[Wait, ...]:
    """Everything that pipelines wait for now. `called`: names by pipeline id, beside those that were registered; who
    has none goes by the id."""
    names = pipeline_names(control, called)
    since = {(wait.pipeline_id, wait.cluster): wait.since for wait in control.waiting}
    control = _as_asked(control)
    found = []
    for pipeline in control.pipelines:
        for cluster in pipeline.clusters:
            if cluster.name in pipeline.waiting:
                what = f"devices {' or '.join(device_list(choice) for choice in cluster.choices)}"
            elif _waits_for_a_bundle(pipeline, cluster, control):
                what = f"a rollout device out of {device_list(tuple(sorted(cluster.devices)))}"
            else:
                continue
            reasons = (
                *_holders(control, pipeline, cluster, names),
                *_others(control, pipeline, cluster, names),
                *_in_vain(control, pipeline, cluster),
            )
            found.append(
                Wait(
                    pipeline.pipeline_id,
                    names.get(pipeline.pipeline_id, pipeline.pipeline_id),
                    cluster.name,
                    f"{what} ({words(cluster.name)})",
                    reasons or ("nobody holds them: the scheduler has not come to it",),
                    since.get((pipeline.pipeline_id, cluster.name)),
                )
            )
    return tuple(found)


def _as_asked(control: ControlStatus) -> ControlStatus:
    """Each cluster with the devices that it waits for, which may be some of its own."""
    asked = {(wait.pipeline_id, wait.cluster): wait.choices for wait in control.waiting if wait.choices}

    def of(pipeline: PipelineStatus, cluster: Cluster) -> Cluster:
        first, *others = asked.get((pipeline.pipeline_id, cluster.name), cluster.choices)
        return replace(cluster, devices=first, alternatives=tuple(others))

    return replace(
        control, pipelines=tuple(replace(p, clusters=tuple(of(p, c) for c in p.clusters)) for p in control.pipelines)
    )


def pipeline_names(control: ControlStatus, called: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """What people call each pipeline, by its id: "sort", or "sort (ft_2)" where several have the name. `called`: names
    that are known beside those that were registered."""
    registered = {pipeline.pipeline_id: pipeline.name or pipeline.pipeline_id for pipeline in control.pipelines}
    names = {**registered, **called}
    often = Counter(names.values())
    return {pipeline_id: f"{name} ({pipeline_id})" if often[name] > 1 else name for pipeline_id, name in names.items()}


def process_list(control: ControlStatus, status: LeaseStatus, limit: int | None = 3) -> str:
    """ "4711, 4712 +6": whose bytes are under a lease; the first `limit` of them, and how many more."""
    pids = [str(process.pid) for process in control.holders.get(status.lease.epoch, ())]
    more = f" +{len(pids) - limit}" if limit is not None and len(pids) > limit else ""
    return ", ".join(pids[:limit]) + more


def device_list(devices: tuple[int, ...]) -> str:
    """ "0–3, 6": consecutive numbers as ranges."""
    ranges: list[list[int]] = []
    for device in devices:
        if ranges and device == ranges[-1][1] + 1:
            ranges[-1][1] = device
        else:
            ranges.append([device, device])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in ranges) or "–"


def words(name: str) -> str:
    """ "actor training" for "actor_training"."""
    return name.replace("_", " ")


def _waits_for_a_bundle(pipeline: PipelineStatus, cluster: Cluster, control: ControlStatus) -> bool:
    """Whether it rolls out, on no device, although none of its clusters holds one or asks for one."""
    if not cluster.elastic or not pipeline.demand.trajectories or pipeline.waiting:
        return False
    return all(status.lease.pipeline_id != pipeline.pipeline_id for status in control.leases)


def _holders(
    control: ControlStatus, pipeline: PipelineStatus, cluster: Cluster, names: Mapping[str, str]
) -> Iterable[str]:
    wanted = set().union(*cluster.choices)
    for status in control.leases:
        lease = status.lease
        common = wanted.intersection(lease.devices)
        if common and (lease.pipeline_id, lease.cluster) != (pipeline.pipeline_id, cluster.name):
            name = names.get(lease.pipeline_id, lease.pipeline_id)
            name = f"{name} itself" if lease.pipeline_id == pipeline.pipeline_id else name
            yield f"{name} {_holds(status)} {_numbers(common)}{_for(status)}{_processes(control, status)}"


def _others(
    control: ControlStatus, pipeline: PipelineStatus, cluster: Cluster, names: Mapping[str, str]
) -> Iterable[str]:
    wanted = set().union(*cluster.choices)
    for other in control.pipelines:
        for rival in other.clusters:
            rivals = other.pipeline_id != pipeline.pipeline_id and rival.name in other.waiting
            if rivals and any(wanted.intersection(choice) for choice in rival.choices):
                yield f"{names.get(other.pipeline_id, other.pipeline_id)} waits for {_numbers(rival.devices)}, too"


def _in_vain(control: ControlStatus, pipeline: PipelineStatus, cluster: Cluster) -> Iterable[str]:
    """Why it is granted nothing, whoever gives a device back."""
    places = cluster.bundles if cluster.elastic else cluster.choices
    if control.drained and not any(map(control.lent.issuperset, places)):
        yield control.drained
    if cluster.name in pipeline.deaf:
        yield "it did not take up what it was granted, and has not asked for news of its rollout since"


def _holds(status: LeaseStatus) -> str:
    return "is next on" if status.state is LeaseState.PENDING else "holds"


def _for(status: LeaseStatus) -> str:
    states = {LeaseState.DRAINING: ", giving way", LeaseState.QUARANTINED: ", quarantined"}
    giving_way = states.get(status.state, "")
    return f" for {words(status.lease.phase.name.lower())}{giving_way}"


def _processes(control: ControlStatus, status: LeaseStatus) -> str:
    """Whose bytes are there, and why nobody gets the devices where that is so."""
    pids = process_list(control, status)
    named = f" (process {pids})" if pids else ""
    return f"{named}: {status.reason}" if status.state is LeaseState.QUARANTINED else named


def _numbers(devices: Iterable[int]) -> str:
    return device_list(tuple(sorted(devices)))
