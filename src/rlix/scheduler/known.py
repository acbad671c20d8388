"""What the control plane knows: how it is kept, and read."""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from types import MappingProxyType

from rlix.protocol.errors import PipelineGoneError, RlixError
from rlix.protocol.events import GangRequested
from rlix.protocol.messages import Cluster, Demand, Device, LeaseStatus, Process, Registration
from rlix.protocol.types import Phase
from rlix.scheduler.account import Account, Given
from rlix.scheduler.placement import Arrivals
from rlix.scheduler.snapshot import Bundles, GangRequest, Snapshot

ClusterKey = tuple[str, str]  # (pipeline_id, cluster)


class StateError(RlixError):
    """An event contradicts what is known. The state is unchanged."""


class Known:
    """Registrations, requests, demand and leases; `State` changes them, and nobody else."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._discovered: tuple[Device, ...] = ()  # the same; as it is whenever somebody asks for so many
        self._draining: frozenset[str] = frozenset()  # nodes
        self._cordoned: tuple[str, ...] = ()
        self._allocated: dict[str, str] = {}
        self._registrations: dict[str, Registration] = {}
        self._admitted: set[str] = set()
        self._ending: dict[str, str] = {}  # why, by pipeline whose devices are being taken back
        self._spared: dict[str, Process] = {}  # who said so, and is not ended with the others; where there is one
        self._holders: dict[ClusterKey, dict[int, Process]] = {}
        self._requests: dict[int, GangRequest] = {}
        self._last_on: dict[ClusterKey, tuple[int, ...]] = {}  # where a gang with alternatives last was
        self._rollouts: dict[ClusterKey, Account] = {}
        self._leases: dict[int, LeaseStatus] = {}
        self._leases_of: dict[str, set[int]] = {}  # pipeline -> epochs
        self._holder: dict[int, int] = {}  # device -> epoch of the active or draining lease on it
        self._successor: dict[int, int] = {}  # device -> epoch of the pending lease on it
        self._answered: dict[int, GangRequest] = {}  # the request that a pending lease answers
        self._gang_since: dict[int, float] = {}  # epoch -> when the gang became active
        self._moves: dict[int, float] = {}  # epoch -> the seconds that the gang's state is on its way meanwhile
        self._given: dict[str, Given] = {}  # by pipeline that was admitted
        self._gang_work: dict[tuple[str, str, Phase], float] = {}  # GPU-seconds that it took last time
        self._bundles: dict[Bundles, Bundles] = {}  # equal placements share one tuple, which the planner exploits
        self._now = 0.0  # of the event that is being applied
        self.next_epoch, self.next_request_id, self.next_device_id, self.next_pipeline = 1, 1, 0, 1
        # What others may read, as it is at any time.
        self.allocated: Mapping[str, str] = MappingProxyType(self._allocated)  # kind, of every id that has not ended
        self.registrations: Mapping[str, Registration] = MappingProxyType(self._registrations)
        self.ending: Mapping[str, str] = MappingProxyType(self._ending)
        self.spared: Mapping[str, Process] = MappingProxyType(self._spared)
        self.requests: Mapping[int, GangRequest] = MappingProxyType(self._requests)  # that wait
        self.leases: Mapping[int, LeaseStatus] = MappingProxyType(self._leases)  # in order of grant

    @property
    def devices(self) -> tuple[Device, ...]:
        """The pool. Of a node that is drained, what somebody holds is in it."""
        return tuple(filter(self._in_pool, self._devices.values())) if self._draining else self.discovered

    @property
    def lent(self) -> tuple[Device, ...]:
        """The devices that may be granted to somebody, once they are free."""
        if not self._draining:
            return self.discovered
        return tuple(device for device in self._devices.values() if device.node_id not in self._draining)

    @property
    def discovered(self) -> tuple[Device, ...]:
        """The pool, and what is free on nodes that are drained: it comes back under the numbers it had."""
        return self._discovered

    @property
    def draining(self) -> frozenset[str]:
        """The nodes whose devices leave the pool as they become free."""
        return self._draining

    @property
    def cordoned(self) -> tuple[str, ...]:
        """The nodes that a person has taken out of service."""
        return self._cordoned

    def device(self, number: int) -> Device | None:
        """The device with this id, if it is in the pool."""
        device = self._devices.get(number)
        return device if device is not None and self._in_pool(device) else None

    def is_discovered(self, number: int) -> bool:
        """Whether the device was not lost with its node."""
        return number in self._devices

    def is_lent(self, number: int) -> bool:
        """Whether the device may be granted to somebody, once it is free."""
        device = self._devices.get(number)
        return device is not None and device.node_id not in self._draining

    @property
    def out_of_service(self) -> bool:
        """Whether every host is drained: whoever waits for a device waits for a host to come back."""
        return bool(self._draining) and bool(self._devices) and not self.lent

    def on_draining(self, devices: Iterable[int]) -> bool:
        """Whether any of them is on a node that is drained."""
        return any(d in self._devices and not self.is_lent(d) for d in devices)

    def _in_pool(self, device: Device) -> bool:
        return device.node_id not in self._draining or device.id in self._holder

    @property
    def admitted(self) -> frozenset[str]:
        return frozenset(self._admitted)

    def holders(self, pipeline_id: str, cluster: str) -> Mapping[int, Process]:
        """The processes that were named for a cluster, by rank; see `HoldersNamed`."""
        return MappingProxyType(self._holders.get((pipeline_id, cluster), {}))

    @property
    def demands(self) -> Mapping[ClusterKey, Demand]:
        return {key: rollout.demand for key, rollout in self._rollouts.items()}

    def demand(self, pipeline_id: str, cluster: str) -> Demand:
        """What a rollout has reported last; nothing where it has not."""
        rollout = self._rollouts.get((pipeline_id, cluster))
        return Demand(0) if rollout is None else rollout.demand

    def answered_by(self, epoch: int) -> GangRequest | None:
        """The request that a pending gang lease answers."""
        return self._answered.get(epoch)

    def holder(self, device: int) -> int | None:
        """The epoch of the lease whose bytes may be on the device: active, draining or quarantined."""
        return self._holder.get(device)

    def successors(self, devices: Iterable[int]) -> tuple[int, ...]:
        """The pending leases that wait for any of these devices, by epoch."""
        return tuple(sorted({self._successor[device] for device in devices if device in self._successor}))

    def leases_of(self, pipeline_id: str) -> tuple[LeaseStatus, ...]:
        return tuple(self._leases[epoch] for epoch in sorted(self._leases_of.get(pipeline_id, ())))

    def snapshot(self, now: float) -> Snapshot:
        """What the planner needs, admitted pipelines only. Costs a pass over rollouts and references to the rest.

        `now`: seconds of the clock that the events' times were read from.
        """
        admitted = (each for each in self._rollouts.items() if each[0][0] in self._admitted)
        rollouts = tuple(rollout.seen(*key, self._given[key[0]], now) for key, rollout in admitted)
        requests = tuple(r for r in self._requests.values() if r.pipeline_id in self._admitted)
        given = {r.pipeline_id: self._given[r.pipeline_id].at(now) for r in requests}
        return Snapshot(self.lent, requests, rollouts, tuple(self._leases.values()), now, given, self._gang_left_s(now))

    def _gang_left_s(self, now: float) -> dict[int, float]:
        """By epoch, of gangs whose phase was measured before. Who takes longer is expected to take as much again."""
        left = {}
        for epoch, since in self._gang_since.items():
            lease = self._leases[epoch].lease
            if work := self._gang_work.get((lease.pipeline_id, lease.cluster, lease.phase)):
                left[epoch] = abs(since + self._moves.get(epoch, 0.0) + work / len(lease.devices) - now)
        return left

    # -- for the one who changes it ------------------------------------------------------------------------------

    def _gang_devices(self, pipeline_id: str) -> tuple[int, ...]:
        """Where the pipeline will ask for gangs, as far as is known."""
        gangs = [c for c in self._registrations[pipeline_id].clusters if not c.elastic]
        return tuple(sorted({device for gang in gangs for device in self._expected_on(pipeline_id, gang)}))

    def _expected_on(self, pipeline_id: str, cluster: Cluster) -> tuple[int, ...]:
        """The first choice of a cluster's gang: where it last was, unless that was narrower than what it declares."""
        last = self._last_on.get((pipeline_id, cluster.name), cluster.devices)
        return last if len(last) == len(cluster.devices) else cluster.devices

    def _placed(self, asked: GangRequested, cluster: Cluster) -> GangRequest:
        """The request with the devices on which it may be granted, the expected ones first.

        Where it can, it avoids what its own caller holds until it is granted.
        """
        choices = (asked.first,) if asked.exact else self._choices(asked.holding, cluster)
        first = asked.first or self._expected_on(asked.pipeline_id, cluster)
        first = first if first in choices else choices[0]
        others = tuple(devices for devices in choices if devices != first)
        return GangRequest(
            asked.request_id,
            asked.pipeline_id,
            asked.cluster,
            asked.phase,
            first,
            others,
            asked.key,
            asked.holder,
            asked.holding,
            asked.longest_s,
            asked.exact,
            asked.until,
            self._gang_work.get((asked.pipeline_id, asked.cluster, asked.phase), 0.0),
            self._now - asked.waited_s,
            asked.move_s if asked.first == first else 0.0,  # else it moves in any case
        )

    def _choices(self, holding: Iterable[int], cluster: Cluster) -> tuple[tuple[int, ...], ...]:
        """Where a gang may be granted that is asked for while these epochs are kept."""
        kept = {d for epoch in holding if epoch in self._leases for d in self._leases[epoch].lease.devices}
        apart = (c for c in cluster.choices if kept.isdisjoint(c) and all(map(self.is_lent, c))) if kept else ()
        return tuple(apart) or cluster.choices

    def _offer(self, came: Set[int]) -> None:
        """Devices that came may be granted to gangs that run anywhere, also to those that wait."""
        arrivals = Arrivals(self._devices.values(), came)
        for pipeline_id, known in self._registrations.items():
            clusters = tuple(
                arrivals.offered(cluster, self._last_on.get((pipeline_id, cluster.name)))
                if cluster.anywhere
                else cluster
                for cluster in known.clusters
            )
            if clusters != known.clusters:
                self._registrations[pipeline_id] = replace(known, clusters=clusters)
        for requests in (self._requests, self._answered):  # who was answered may have to wait again
            for key, request in requests.items():
                cluster = self._cluster(request.pipeline_id, request.cluster)
                if cluster.anywhere and not request.exact:
                    others = (c for c in self._choices(request.holding, cluster) if c != request.devices)
                    requests[key] = replace(request, alternatives=tuple(others))

    def _account(self, pipeline_id: str) -> Given:
        """A newcomer's begins at the least of the others', so that it neither pays for nor gains by being late."""
        if pipeline_id not in self._given:
            least = min((given.at(self._now) for given in self._given.values()), default=0.0)
            self._given[pipeline_id] = Given(self._now, least)
        return self._given[pipeline_id]

    def _planned_for(self) -> Iterator[Account]:
        return (rollout for key, rollout in self._rollouts.items() if key[0] in self._admitted)

    def _registration(self, pipeline_id: str) -> Registration:
        if pipeline_id not in self._registrations:
            raise PipelineGoneError(f"pipeline {pipeline_id!r} is not registered (any more)")
        return self._registrations[pipeline_id]

    def _cluster(self, pipeline_id: str, name: str) -> Cluster:
        for cluster in self._registration(pipeline_id).clusters:
            if cluster.name == name:
                return cluster
        raise StateError(f"pipeline {pipeline_id!r} registered no cluster {name!r}")

    def _status(self, epoch: int) -> LeaseStatus:
        if epoch not in self._leases:
            raise StateError(f"lease {epoch} is not held (any more)")
        return self._leases[epoch]


def check_cluster(pipeline_id: str, cluster: Cluster) -> None:
    """Raises StateError unless its devices are different ones, in whole bundles."""
    where = f"cluster {cluster.name!r} of pipeline {pipeline_id!r}"
    if not cluster.devices or len(set(cluster.devices)) != len(cluster.devices):
        raise StateError(f"{where} must name at least one device and none twice, not {cluster.devices}")
    if cluster.tensor_parallel_size < 1 or len(cluster.devices) % cluster.tensor_parallel_size:
        raise StateError(
            f"{where}: {len(cluster.devices)} devices cannot be cut into bundles of {cluster.tensor_parallel_size}"
        )
    for devices in cluster.alternatives:
        if not devices or len(set(devices)) != len(devices) or len(devices) % cluster.tensor_parallel_size:
            raise StateError(
                f"{where}: alternative {devices} must be different devices in bundles of {cluster.tensor_parallel_size}"
            )
