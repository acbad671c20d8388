"""Checks what a pipeline declares, and places what it asks for by size, before anything is recorded about it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rlix.protocol.errors import SpecError
from rlix.protocol.messages import MOST_CLUSTERS, Cluster, Device, Registration
from rlix.protocol.types import DEVICE_RANGE, ClusterName, Phase
from rlix.scheduler.placement import Wish, place

_MOST_DEVICES = 1_000_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def build_registration(
    pipeline_id: str,
    ray_namespace: object,
    cluster_tp_configs: object,
    cluster_device_mappings: object,
    devices: Sequence[Device],
    cluster_device_alternatives: object = None,
    elastic_clusters: object = None,
    others: Iterable[Registration] = (),
    *,
    called: str = "",
) -> Registration:
    """Turns the arguments of `register_pipeline` into a `Registration`.

    `cluster_device_mappings[name]` is one of

    - `[0, 1, 2, 3]` (a list or tuple): these devices, in rank order;
    - `8`: that many devices, placed by the pool; for an elastic cluster the most it may use;
    - `{"min": 4, "max": 8}` or `"4-8"`, gangs only: 8 devices, or all of a smaller pool, or fewer down to 4 where it
      would otherwise wait;
    - `None`, elastic clusters only: the whole pool, in whole bundles.

    A gang that asks for a size is told of other blocks it can move to (`Cluster.alternatives`); an empty list in
    `cluster_device_alternatives` says that it stays where it is placed. `elastic_clusters` names the clusters that run
    rollouts; None: `actor_infer`, if there is one. `others`: who has registered before, for the crowding of devices.
    `called`: the pipeline's name, for people; messages use it.

    Raises:
        SpecError: one line for each cluster that is wrong, naming the pipeline, the cluster, what is wrong and the fix.
    """
    where = f"job {called!r:.80}" if called else f"register_pipeline({pipeline_id!r:.80})"
    if not isinstance(ray_namespace, str) or not ray_namespace:
        raise SpecError(f"{where}: ray_namespace must be a non-empty string, got {ray_namespace!r:.80}")
    sizes = _mapping(where, "cluster_tp_configs", cluster_tp_configs)
    mappings = _mapping(where, "cluster_device_mappings", cluster_device_mappings)
    for name in [*sizes, *mappings]:
        _check_name(where, name)
    for name in sorted(sizes.keys() ^ mappings.keys()):
        has, lacks = "cluster_tp_configs", "cluster_device_mappings"
        if name in mappings:
            has, lacks = lacks, has
        raise SpecError(f"{where}: cluster {name!r} is in {has} but not in {lacks}; name it in both or in neither")
    alternatives: Mapping[str, object] = {}
    if cluster_device_alternatives is not None:
        alternatives = _mapping(where, "cluster_device_alternatives", cluster_device_alternatives, may_be_empty=True)
        for name in sorted(alternatives.keys() - mappings.keys()):
            raise SpecError(
                f"{where}: cluster_device_alternatives: cluster {name!r:.80} is not in cluster_device_mappings"
            )
    elastic = _elastic(where, mappings, elastic_clusters)
    clusters = _placed(where, sizes, mappings, alternatives, elastic, devices, others)
    return Registration(pipeline_id=pipeline_id, ray_namespace=ray_namespace, clusters=clusters, name=called)


def _placed(
    where: str,
    sizes: Mapping[str, object],
    mappings: Mapping[str, object],
    alternatives: Mapping[str, object],
    elastic: frozenset[str],
    devices: Sequence[Device],
    others: Iterable[Registration],
) -> tuple[Cluster, ...]:
    """All clusters, checked one by one and placed together."""
    wishes, sets, problems = [], {}, []
    nodes = {device.id: device.node_id for device in devices}
    for name in mappings:
        declared = _Declared(f"{where}: cluster {name!r}", name, name in elastic, nodes)
        try:
            wish = declared.wish(sizes[name], mappings[name], moves=name not in alternatives)
            sets[name] = declared.alternatives(wish, alternatives[name]) if name in alternatives else ()
            wishes.append(wish)
        except SpecError as error:
            problems.append(str(error))
    if problems:
        raise SpecError("\n".join(problems))
    try:
        placed = place(wishes, devices, others)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    return tuple(replace(c, alternatives=sets[c.name]) if sets[c.name] else c for c in placed)


def check_gang_request(
    registration: Registration, cluster: object, phase: object, devices: tuple[int, ...] = ()
) -> Cluster:
    """The cluster a gang request names, if it may ask for one in this phase, and for these devices of it.

    Raises:
        SpecError: unknown cluster or phase, a rollout asked for as a gang, or devices that are not the cluster's.
    """
    where = job_name(registration)
    if isinstance(phase, bool) or not isinstance(phase, int) or phase not in list(Phase):
        known = ", ".join(f"{p.name}={p.value}" for p in Phase)
        raise SpecError(f"{where}: unknown phase {phase!r:.80}; phases are: {known}")
    found = check_cluster(registration, cluster)
    if found.elastic:
        raise SpecError(
            f"{where}: cluster {found.name!r} is elastic: its devices come and go and cannot be held for a phase; ask "
            "for them with rollout(), or make it a gang"
        )
    if phase == Phase.ROLLOUT:
        raise SpecError(
            f"{where}: cluster {found.name!r}, phase ROLLOUT: rollouts are elastic and cannot be held for a phase; use "
            f"rollout() and {_elastic_names(registration)}"
        )
    if devices and not found.has(devices):
        raise SpecError(
            f"{where}: gang {found.name!r} has {describe_ids(found.devices)}, and {describe_ids(devices)} were asked "
            "for: ask for some of the gang's, each once"
        )
    return found


def check_rollout_cluster(registration: Registration, cluster: object) -> Cluster:
    """The cluster that a rollout names.

    Raises:
        SpecError: unknown cluster, or one that asks for gangs.
    """
    where = job_name(registration)
    found = check_cluster(registration, cluster)
    if not found.elastic:
        raise SpecError(
            f"{where}: cluster {found.name!r} is a gang: ask for it with phase(); rollout() and demand are for "
            f"{_elastic_names(registration)}"
        )
    return found


def check_cluster(registration: Registration, cluster: object) -> Cluster:
    """The cluster of this name.

    Raises:
        SpecError: the job has none.
    """
    for candidate in registration.clusters:
        if candidate.name == cluster:
            return candidate
    known = ", ".join(c.name for c in registration.clusters)
    raise SpecError(f"{job_name(registration)} has no cluster {cluster!r:.80}; it has: {known}")


def job_name(registration: Registration) -> str:
    """How messages begin: with what its user calls the job."""
    return f"job {(registration.name or registration.pipeline_id)!r:.80}"


def declared(registration: Registration) -> object:
    """What tells whether two declarations are the same, wherever each was placed."""
    clusters = [(c.name, c.tensor_parallel_size, len(c.devices), c.elastic) for c in registration.clusters]
    return registration.ray_namespace, registration.name, clusters


def _elastic_names(registration: Registration) -> str:
    names = [repr(cluster.name) for cluster in registration.clusters if cluster.elastic]
    return " or ".join(names) or "elastic clusters, of which it has none"


def _mapping(where: str, field: str, value: object, *, may_be_empty: bool = False) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: {field} must be a dict keyed by cluster name, got {type(value).__name__}")
    if not value and not may_be_empty:
        raise SpecError(f"{where}: {field} is empty; name at least one cluster")
    if len(value) > MOST_CLUSTERS:
        raise SpecError(f"{where}: a job has at most {MOST_CLUSTERS} clusters, and {field} names {len(value)}")
    return value


def _check_name(where: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(
            f"{where}: {name!r:.80} cannot be a cluster's name; use a word of at most 64 letters, digits, '_' and '-' "
            f"that does not begin with a digit, such as {ClusterName.ACTOR_TRAIN.value!r}"
        )


def _elastic(where: str, mappings: Mapping[str, object], value: object) -> frozenset[str]:
    if value is None:
        return frozenset({ClusterName.ACTOR_INFER.value} & mappings.keys())
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
        raise SpecError(f"{where}: elastic_clusters must be a list of cluster names, got {value!r:.80}")
    known = ", ".join(mappings)
    for name, times in Counter(value).items():
        if name not in mappings:
            raise SpecError(
                f"{where}: elastic_clusters: cluster {name!r:.80} is not in cluster_device_mappings: {known}"
            )
        if times > 1:
            raise SpecError(f"{where}: elastic_clusters: cluster {name!r} is named more than once; name each once")
    return frozenset(value)


class _Declared:
    """One cluster's part of the declaration; `where` begins every message."""

    def __init__(self, where: str, name: str, elastic: bool, nodes: Mapping[int, str]) -> None:
        self.where = where
        self.name = name
        self.elastic = elastic
        self.nodes = nodes

    def wish(self, tensor_parallel: object, mapping: object, *, moves: bool) -> Wish:
        """Raises SpecError, as all methods do."""
        size = self._tensor_parallel(tensor_parallel)
        field = f"{self.where}: devices"
        if isinstance(mapping, list | tuple):
            ids = self._ids(field, mapping)
            if len(ids) % size:
                raise SpecError(
                    f"{self.where}: tensor-parallel size {size} does not divide its {len(ids)} devices; change one of "
                    "the two"
                )
            self._check_bundles(field, ids, size)
            return Wish(self.name, size, self.elastic, devices=ids)
        least, most = self._range(field, mapping)
        wish = Wish(self.name, size, self.elastic, least=least, most=most, moves=moves)
        if least == most and most % size:
            raise SpecError(f"{field}: {most} is not a multiple of the tensor-parallel size {size}; change one of them")
        if not wish.widths and most:
            raise SpecError(f"{field}: no multiple of the tensor-parallel size {size} lies from {least} to {most}")
        return wish

    def alternatives(self, wish: Wish, value: object) -> tuple[tuple[int, ...], ...]:
        field = f"{self.where}: cluster_device_alternatives"
        if not isinstance(value, list | tuple):
            raise SpecError(f"{field}: must be a list of lists of device ids, got {value!r:.80}")
        if value and self.elastic:
            raise SpecError(f"{field}: rollouts are elastic; name all their devices in cluster_device_mappings")
        if value and not wish.devices:
            raise SpecError(
                f"{field}: the cluster asks for a size, so its alternatives are found for it; leave them out, or list "
                "device ids in cluster_device_mappings too"
            )
        sets = []
        for number, given in enumerate(value):
            ids = self._ids(f"{field}[{number}]", given)
            if len(ids) % wish.tensor_parallel_size:
                raise SpecError(
                    f"{field}[{number}]: {len(ids)} devices are no multiple of the tensor-parallel size "
                    f"{wish.tensor_parallel_size}; name more or fewer"
                )
            sets.append(ids)
        return tuple(sets)

    def _tensor_parallel(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(f"{self.where}: the tensor-parallel size must be an int, got {value!r:.80}")
        if value < 1:
            raise SpecError(f"{self.where}: the tensor-parallel size must be at least 1, got {value}")
        if value > _MOST_DEVICES:
            raise SpecError(f"{self.where}: the tensor-parallel size must be at most {_MOST_DEVICES}")
        return value

    def _range(self, field: str, value: object) -> tuple[int, int]:
        """The least and the most devices; (0, 0): the whole pool."""
        if value is None:
            if not self.elastic:
                raise SpecError(f"{field}: must be given: a number of devices such as 2, or a list of device ids")
            return 0, 0
        if isinstance(value, str) and (written := DEVICE_RANGE.fullmatch(value)):
            value = {"min": int(written[1]), "max": int(written[2])}
        if isinstance(value, Mapping):
            return self._both_ends(field, value)
        most = self._count(field, value)
        return most, most

    def _both_ends(self, field: str, value: Mapping[object, object]) -> tuple[int, int]:
        if value.keys() != {"min", "max"}:
            raise SpecError(f"{field}: a range has a min and a max, such as {{'min': 4, 'max': 8}}, got {value!r:.80}")
        if self.elastic:
            raise SpecError(
                f"{field}: the cluster is elastic and grows and shrinks by itself; give the most devices it may use "
                "as one int, or None for the whole pool"
            )
        least = self._count(f"{field}: min", value["min"])
        most = self._count(f"{field}: max", value["max"], of=_MOST_DEVICES)
        if least > most:
            raise SpecError(f"{field}: min {least} is more than max {most}; exchange them")
        return least, min(most, len(self.nodes))

    def _count(self, field: str, value: object, of: int | None = None) -> int:
        """`of`: the most it may be; None: what the pool has."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(
                f"{field}: must be a list of device ids (ints), a number of devices, or a range such as "
                f"{{'min': 4, 'max': 8}}, got {value!r:.80}"
            )
        if value < 1:
            raise SpecError(f"{field}: a cluster needs at least 1 device, got {value}")
        if of is None and value > len(self.nodes):
            have = f"{len(self.nodes)}; ask for fewer" if self.nodes else "none"
            raise SpecError(f"{field}: asks for {value} devices, and this pool has {have}")
        if of is not None and value > of:
            raise SpecError(f"{field}: must be at most {of}, got {value}")
        return value

    def _ids(self, field: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or not all(
            isinstance(d, int) and not isinstance(d, bool) for d in value
        ):
            raise SpecError(f"{field}: must be a list of device ids (ints), got {value!r:.80}")
        if not value:
            raise SpecError(f"{field}: is empty; name at least one device")
        for device, times in Counter(value).items():
            if device not in self.nodes:
                raise SpecError(f"{field}: device {device} does not exist; this pool has {describe_ids(self.nodes)}")
            if times > 1:
                raise SpecError(f"{field}: device {device} is named more than once; name each device once")
        return tuple(value)

    def _check_bundles(self, field: str, ids: tuple[int, ...], size: int) -> None:
        """A replica's devices talk at every token: they share a node where they can."""
        largest = max(Counter(self.nodes.values()).values())
        if not self.elastic or size > largest:
            return
        for rank, start in enumerate(range(0, len(ids), size)):
            bundle = ids[start : start + size]
            if (spread := len({self.nodes[device] for device in bundle})) > 1:
                raise SpecError(
                    f"{field}: bundle {rank} (devices {list(bundle)}) is spread over {spread} nodes although {size} "
                    "devices fit in one; order the devices so that every bundle stays on one node"
                )


def describe_ids(ids: Iterable[int]) -> str:
    """Device ids for a message, such as "devices 0-3, 7"."""
    runs: list[list[int]] = []
    for device in sorted(ids):
        if runs and device == runs[-1][-1] + 1:
            runs[-1][1:] = [device]
        else:
            runs.append([device])
    if not runs:
        return "no devices"
    if len(runs) == 1 and len(runs[0]) == 1:
        return f"device {runs[0][0]} only"
    return "devices " + ", ".join("-".join(map(str, run)) for run in runs)
