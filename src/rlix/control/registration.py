"""Checks what a pipeline declares before anything is recorded about it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Cluster, Device, Registration
from rlix.protocol.types import ClusterName, Phase

ROLLOUT_CLUSTER = ClusterName.ACTOR_INFER
"""The elastic cluster: its bundles follow reported demand; every other cluster asks for gangs."""


def build_registration(
    pipeline_id: str,
    ray_namespace: object,
    cluster_tp_configs: object,
    cluster_device_mappings: object,
    devices: Sequence[Device],
    cluster_device_alternatives: object = None,
    *,
    name: str = "",
) -> Registration:
    """Turns the arguments of `register_pipeline` into a `Registration`.

    Raises:
        SpecError: naming the pipeline, the cluster, the field and the fix.
    """
    where = f"register_pipeline({pipeline_id!r})"
    if not isinstance(ray_namespace, str) or not ray_namespace:
        raise SpecError(f"{where}: ray_namespace must be a non-empty string, got {ray_namespace!r}")
    sizes = _mapping(where, "cluster_tp_configs", cluster_tp_configs)
    mappings = _mapping(where, "cluster_device_mappings", cluster_device_mappings)
    for name in [*sizes, *mappings]:
        _check_name(where, name)
    for name in sorted(sizes.keys() ^ mappings.keys()):
        has, lacks = "cluster_tp_configs", "cluster_device_mappings"
        if name in mappings:
            has, lacks = lacks, has
        raise SpecError(f"{where}: cluster {name!r} is in {has} but not in {lacks}; name it in both or in neither")
    clusters = tuple(_cluster(where, name, sizes[name], mappings[name], devices) for name in mappings)
    if cluster_device_alternatives is not None:
        alternatives = _mapping(where, "cluster_device_alternatives", cluster_device_alternatives)
        for name in sorted(alternatives.keys() - mappings.keys()):
            raise SpecError(f"{where}: cluster_device_alternatives: cluster {name!r} is not in cluster_device_mappings")
        clusters = tuple(_with_alternatives(where, c, alternatives.get(c.name, ()), devices) for c in clusters)
    return Registration(pipeline_id=pipeline_id, ray_namespace=ray_namespace, clusters=clusters, name=name)


def check_gang_request(registration: Registration, cluster: object, phase: object) -> Cluster:
    """The cluster a gang request names, if it may ask for one in this phase.

    Raises:
        SpecError: unknown cluster or phase, or a rollout asked for as a gang.
    """
    where = f"request_gang({registration.pipeline_id!r})"
    if isinstance(phase, bool) or not isinstance(phase, int) or phase not in list(Phase):
        known = ", ".join(f"{p.name}={p.value}" for p in Phase)
        raise SpecError(f"{where}: unknown phase {phase!r}; phases are: {known}")
    found = _registered(where, registration, cluster)
    if found.name == ROLLOUT_CLUSTER or phase == Phase.ROLLOUT:
        raise SpecError(
            f"{where}: cluster {found.name!r}, phase {Phase(phase).name}: rollouts are elastic and cannot be asked for "
            f"as a gang; call report_demand for cluster {ROLLOUT_CLUSTER.value!r} instead"
        )
    return found


def check_rollout_cluster(registration: Registration, cluster: object) -> Cluster:
    """The cluster a demand report names.

    Raises:
        SpecError: unknown cluster, or one that asks for gangs.
    """
    where = f"report_demand({registration.pipeline_id!r})"
    found = _registered(where, registration, cluster)
    if found.name != ROLLOUT_CLUSTER:
        raise SpecError(
            f"{where}: cluster {found.name!r} is not elastic; only {ROLLOUT_CLUSTER.value!r} reports demand, "
            "the others call request_gang"
        )
    return found


def _registered(where: str, registration: Registration, cluster: object) -> Cluster:
    for candidate in registration.clusters:
        if candidate.name == cluster:
            return candidate
    known = ", ".join(c.name for c in registration.clusters)
    raise SpecError(f"{where}: cluster {cluster!r} is not registered; this pipeline registered: {known}")


def _mapping(where: str, field: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: {field} must be a dict keyed by cluster name, got {type(value).__name__}")
    if not value:
        raise SpecError(f"{where}: {field} is empty; name at least one cluster")
    return value


def _check_name(where: str, name: object) -> None:
    if not isinstance(name, str) or name not in list(ClusterName):
        known = ", ".join(c.value for c in ClusterName)
        raise SpecError(f"{where}: unknown cluster {name!r}; clusters are: {known}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _device_ids(where: str, value: object, devices: Sequence[Device]) -> tuple[int, ...]:
    """A list of existing devices, none twice; `where` begins the message of a SpecError."""
    if not isinstance(value, list | tuple) or not all(_is_int(d) for d in value):
        raise SpecError(f"{where}: must be a list of device ids (ints), got {value!r}")
    if not value:
        raise SpecError(f"{where}: is empty; name at least one device")
    ids = tuple(int(d) for d in value)
    known = {device.id: device for device in devices}
    for device_id in ids:
        if device_id not in known:
            raise SpecError(f"{where}: device {device_id} does not exist; this pool has {describe_ids(known)}")
        if ids.count(device_id) > 1:
            raise SpecError(f"{where}: device {device_id} is named more than once; name each device once")
    return ids


def _with_alternatives(where: str, cluster: Cluster, value: object, devices: Sequence[Device]) -> Cluster:
    field = f"{where}: cluster {cluster.name!r}: cluster_device_alternatives"
    if not isinstance(value, list | tuple):
        raise SpecError(f"{field}: must be a list of lists of device ids, got {value!r}")
    if value and cluster.name == ROLLOUT_CLUSTER:
        raise SpecError(f"{field}: rollouts are elastic; name all their devices in cluster_device_mappings")
    sets = tuple(_device_ids(f"{field}[{number}]", devices_, devices) for number, devices_ in enumerate(value))
    for number, ids in enumerate(sets):
        if len(ids) != len(cluster.devices):
            raise SpecError(
                f"{field}[{number}]: has {len(ids)} devices, the cluster {len(cluster.devices)}; name as many"
            )
    return replace(cluster, alternatives=sets)


def _cluster(where: str, name: str, size: object, mapping: object, devices: Sequence[Device]) -> Cluster:
    def fail(field: str, problem: str) -> NoReturn:
        raise SpecError(f"{where}: cluster {name!r}: {field}: {problem}")

    if not isinstance(size, int) or isinstance(size, bool):
        fail("cluster_tp_configs", f"the tensor-parallel size must be an int, got {size!r}")
    if size < 1:
        fail("cluster_tp_configs", f"the tensor-parallel size must be at least 1, got {size}")
    ids = _device_ids(f"{where}: cluster {name!r}: cluster_device_mappings", mapping, devices)
    by_id = {device.id: device for device in devices}
    if len(ids) % size:
        fail(
            "cluster_tp_configs",
            f"tensor-parallel size {size} does not divide its {len(ids)} devices; change one of the two",
        )
    cluster = Cluster(name=str(name), tensor_parallel_size=size, devices=ids)
    if cluster.name == ROLLOUT_CLUSTER:
        for rank, bundle in enumerate(cluster.bundles):
            nodes = {by_id[d].node_id for d in bundle}
            if len(nodes) > 1 and size <= _largest_node(devices):
                fail(
                    "cluster_device_mappings",
                    f"bundle {rank} (devices {list(bundle)}) is spread over {len(nodes)} nodes although {size} devices "
                    "fit in one; order the devices so that every bundle stays on one node",
                )
    return cluster


def _largest_node(devices: Sequence[Device]) -> int:
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.node_id] = counts.get(device.node_id, 0) + 1
    return max(counts.values(), default=0)


def describe_ids(ids: Mapping[int, object]) -> str:
    """Device ids for a message, such as "devices 0-7"."""
    if not ids:
        return "no devices"
    return f"devices {min(ids)}-{max(ids)}" if len(ids) > 1 else f"device {min(ids)} only"
