"""Where a job's own process is, and what its other hosts must see of what it has; looked at before anything begins."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import ray

from rlix.control.rpc import get
from rlix.node.addresses import host_name
from rlix.node.host import Host
from rlix.node.shared_folder import Token
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device, Registration
from rlix.protocol.types import NAMESPACE, ORCHESTRATOR_ACTOR_NAME

_TIMEOUT_S = 90.0


def home(registration: Registration, devices: Mapping[int, Device]) -> str | None:
    """The node that a job's own process belongs on: that of the first rank of its first gang. None: the head.

    On another one it would be lost with a host on which the job has nothing.
    """
    gangs = (cluster for cluster in registration.clusters if not cluster.elastic)
    first = next((cluster.devices[0] for cluster in gangs if cluster.devices), -1)
    return devices[first].node_id if first in devices else None


def nodes_of(registration: Registration, devices: Mapping[int, Device]) -> set[str]:
    """Those with a device that one of the job's clusters may use."""
    ids = {device for cluster in registration.clusters for choice in cluster.choices for device in choice}
    return {devices[device].node_id for device in ids if device in devices}


def check_hosts(spec: JobSpec, run_dir: Path, registration: Registration, devices: Mapping[int, Device]) -> None:
    """The job's hosts see what this process's host has: the folder of its runs, and files that the spec names.

    Raises:
        SpecError: one does not; names it, and what it does not see.
        RlixError: one does not answer.
    """
    if not devices or not ray.is_initialized() or not (others := nodes_of(registration, devices) - {_here()}):
        return
    orchestrator, at_home = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, NAMESPACE), home(registration, devices)
    everywhere, there = list(_models(spec)), list(_files(spec.model_dump()))
    token = Token(run_dir.parent)
    try:
        paths = [str(token.path), *everywhere, *there]
        asked = orchestrator.hosts.remote(paths, token.text, sorted(others))
        hosts: tuple[Host, ...] = get(asked, what="what the job's hosts see", timeout_s=_TIMEOUT_S)
    finally:
        token.remove()
    runs = f"{run_dir.parent}, where the run folder is"
    for host in hosts:
        needed = {str(token.path): runs, **{path: path for path in everywhere}}
        if host.node_id == at_home:
            needed |= {path: path for path in there}
        if unseen := [what for path, what in needed.items() if path in host.unseen]:
            raise SpecError(_refusal(spec, host, unseen, shared=runs in unseen))


def _here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _refusal(spec: JobSpec, host: Host, unseen: Collection[str], *, shared: bool) -> str:
    fix = "put that on a file system that all hosts of the job have at the same path"
    option = " (--runs-dir says where runs go)" if shared else ""
    return (
        f"{spec.name}: host {host.name} ({host.address}) does not see {' and '.join(unseen)} on host {host_name()}; "
        f"{fix}{option}, or give all its clusters devices of one host"
    )


def _models(spec: JobSpec) -> Iterator[str]:
    """The model's folder, which every rank and replica reads, where it is not the hub's."""
    path = getattr(spec.model, "path", "")
    if path and Path(path).exists():
        yield str(Path(path).absolute())


def _files(value: object) -> Iterator[str]:
    """Files and folders of this host that a spec names: data, and code of its user's ("/a/file.py:name")."""
    match value:
        case str() if value.startswith("/"):
            path = value.rpartition(":")[0] if ".py:" in value else value
            if Path(path).exists():
                yield path
        case Mapping():
            for item in value.values():
                yield from _files(item)
        case list() | tuple():
            for item in value:
                yield from _files(item)
