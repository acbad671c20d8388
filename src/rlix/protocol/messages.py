"""Frozen messages that jobs and the control plane exchange."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter, itemgetter
from typing import Literal, TypeVar

from rlix.protocol.types import Phase

Message = TypeVar("Message")


def _pickles_fast(cls: type[Message]) -> type[Message]:
    """For messages of which a status holds thousands: pickled as a call with the fields, in a third of the time that
    a slotted dataclass takes by itself."""
    values = attrgetter(*(field.name for field in fields(cls)))  # type: ignore[arg-type]

    def reduce(self: object) -> tuple[type[Message], tuple[object, ...]]:
        return cls, values(self)

    cls.__reduce__ = reduce  # type: ignore[method-assign]
    return cls


class DeviceKind(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"  # a virtual GPU: a logical slot backed by the CPU


@_pickles_fast
@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or a virtual one. `id` is global and never used again; `index` is its number on its node.

    `key` names the device itself, whoever numbers it: the GPU's UUID, or a virtual GPU's name. It is what a process
    makes visible to itself and what the device lock's file is called.
    """

    id: int
    node_id: str
    node_ip: str
    index: int
    kind: DeviceKind
    key: str = ""


class NodeState(StrEnum):
    READY = "ready"
    CORDONED = "cordoned"  # out of service; nobody holds a device of it
    DRAINING = "draining"  # on its way there: somebody does
    LOST = "lost"  # Ray has given it up
    MISCONFIGURED = "misconfigured"  # lends nothing: it does not answer, or is not as the head is


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A host of the pool. `why` it is not ready, and what to do about that, for people."""

    node_id: str
    name: str
    address: str
    state: NodeState
    why: str = ""

    def __str__(self) -> str:
        return f"host {self.name} ({self.address}) is {self.state}{self.why and f': {self.why}'}"


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for ever: a pid is used again, a pid with its start time is not.

    `started` is what the kernel calls start time: clock ticks since boot. `name` is for people, and names nobody else.
    """

    node_id: str
    pid: int
    started: int
    name: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Fence:
    """Whose bytes are on a device: what the device lock compares, and what it shows to whom it refuses.

    `epoch` is the lease's in `pool`, and grows with every lease of that pool; 0 is no lease: a program's engines share
    their devices under one fence of their own. `job` and `phase` are for people.
    """

    pool: str
    epoch: int
    job: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A named worker set of a pipeline and the devices it may use, in rank order.

    An `elastic` one runs rollouts: it reports demand, and its bundles come and go. Any other asks for gangs.
    `alternatives`: further sets of devices, on any of which the cluster's gang can run just as well; on fewer devices
    it takes longer in proportion. `anywhere`: those were chosen for it, and devices that come to the pool join them.
    """

    name: str
    tensor_parallel_size: int
    devices: tuple[int, ...]
    alternatives: tuple[tuple[int, ...], ...] = ()
    elastic: bool = False
    anywhere: bool = False

    @property
    def bundles(self) -> tuple[tuple[int, ...], ...]:
        """Consecutive groups of `tensor_parallel_size` devices: one per data-parallel rank."""
        return tuple(self.each_bundle())

    def each_bundle(self) -> Iterator[tuple[int, ...]]:
        """The same one by one, for who looks for one of them: there may be thousands."""
        size = self.tensor_parallel_size
        return (self.devices[i : i + size] for i in range(0, len(self.devices), size))

    @property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """Every set of devices a gang may run on, the declared one first."""
        return (self.devices, *self.alternatives)

    def has(self, devices: tuple[int, ...]) -> bool:
        """Whether these are devices, none twice, of one of the choices."""
        return 0 < len(devices) == len(set(devices)) and any(set(devices) <= set(choice) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Registration:
    """What a pipeline declares before it is admitted. `name` is what its user calls it."""

    pipeline_id: str
    ray_namespace: str
    clusters: tuple[Cluster, ...]
    name: str = ""

    def cluster(self, name: str) -> Cluster:
        for cluster in self.clusters:
            if cluster.name == name:
                return cluster
        known = ", ".join(c.name for c in self.clusters)
        raise KeyError(f"pipeline {self.pipeline_id!r} has no cluster {name!r}; it registered: {known}")


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job says a rollout of it still has to do. Zero trajectories: it needs nothing and gives way first.

    The rest is what a job has learnt of itself, zero where it has not: how many trajectories one bundle decodes in
    little more time than one (`knee`); that on k bundles this rollout ends in `floor_s + work_s / k` seconds; the
    GPU-seconds it expects to use until its last step (`left_gpu_s`); the seconds from the grant of a bundle until it
    decodes (`load_s`).
    """

    trajectories: int
    tokens: int = 0
    knee: float = 0.0
    work_s: float = 0.0
    floor_s: float = 0.0
    left_gpu_s: float = 0.0
    load_s: float = 0.0


@_pickles_fast
@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one pipeline to keep bytes on `devices` during `phase`.

    `epoch` is unique and grows with every grant: it names the lease and fences off stale holders.
    `bundle` is the data-parallel rank for a rollout lease, None for a gang. `key`, `holder` and `longest_s` are those
    of the request that a gang's lease answers: the process that asked holds it, besides the cluster's workers.
    """

    epoch: int
    pipeline_id: str
    cluster: str
    phase: Phase
    devices: tuple[int, ...]
    bundle: int | None = None
    key: str = ""
    holder: Process | None = None
    longest_s: float | None = None


class LeaseState(StrEnum):
    PENDING = "pending"  # granted, waits for the leases on its devices to drain
    ACTIVE = "active"
    DRAINING = "draining"  # on its way out: its holder was told, or is being ended
    QUARANTINED = "quarantined"  # its holder may still have bytes there: nobody else gets the devices


class ReleaseReason(StrEnum):
    RELEASED = "released"
    SHRUNK = "shrunk"
    KILLED = "killed"  # its holder did not give it back, and was ended
    UNREGISTERED = "unregistered"
    NODE_LOST = "node lost"  # the node left, and its processes with it
    GIVEN_UP = "given up"  # by a person's command


@_pickles_fast
@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """`reason`: why a lease drains or is quarantined, where that is more than its job's or the planner's wish."""

    lease: Lease
    state: LeaseState
    reason: str = ""


UNSEEN = -1
"""In place of an epoch: nobody could look at the device, for its node does not answer."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """Whoever has a device's lock: under which lease, if it is one of this pool's, and which processes they are."""

    device_id: int
    pool: str
    epoch: int
    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class RolloutAnswer:
    """What a rollout does not know yet of its bundles: those to use, to give back, and that were taken from it.

    `deadlines_s`: for each of `taken`, the seconds until its holder is ended.
    """

    granted: tuple[Lease, ...] = ()
    taken: tuple[Lease, ...] = ()
    deadlines_s: tuple[float, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StartNeed:
    """What a job needs to start. `stated`: bytes of host memory of one process of each cluster, of the program under ""

    Once a job of the same `kind` has trained, what was measured of that one counts instead.
    """

    kind: str
    stated: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One line of a pipeline's lease history. `number` grows with each; `time` is in unix seconds.

    `waited_s`: for a gang that was granted, the seconds from its request until it could use its devices.
    """

    number: int
    event: Literal["granted", "shrinking", "released"]
    lease: Lease
    time: float
    reason: ReleaseReason | None = None
    waited_s: float | None = None


MOST_CLUSTERS = 64
"""Of one job: each is placed while everybody else waits."""
MOST_SECONDS = 1e12  # of a time that is set
MOST_WAIT_S = 3600.0  # of one question
LARGEST_COUNT = 1 << 53  # what every number of a JSON file can be
MOST_METRICS = 32
"""Of a program's last step, as people see them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a program says it is: `step` steps are done, of `steps` (0: it does not say). `metrics`: of the last one,
    under the program's own names."""

    step: int
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def of(self) -> str:
        """ "12/40", or "12" where nobody knows of how many."""
        return f"{self.step}/{self.steps}" if self.steps else str(self.step)


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    pipeline_id: str
    clusters: tuple[Cluster, ...]
    waiting: tuple[str, ...]  # clusters with a gang request that is not granted yet
    demand: Demand
    name: str = ""  # what its user calls it
    ending: str = ""  # why it ends, while its devices are taken back
    progress: Progress | None = None  # of a program that says it
    deaf: tuple[str, ...] = ()  # elastic clusters that did not take a bundle up and have not asked for news since


@dataclass(frozen=True, slots=True)
class Waiting:
    """A gang request that stands in the queue, since when (unix seconds), and what is in its way.

    `choices`: the sets of devices of which it waits for one.
    """

    pipeline_id: str
    cluster: str
    phase: Phase
    since: float
    behind: str
    choices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """A job, or one lease of it, that was ended without its own word: when (unix seconds) and why.

    `job` is what its user calls it; `epoch` and `devices` are the lease's, 0 and none where the whole job was ended.
    """

    time: float
    pipeline_id: str
    job: str
    why: str
    epoch: int = 0
    cluster: str = ""
    devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        name = f"{self.job} ({self.pipeline_id})" if self.job else self.pipeline_id
        where = f", {self.cluster} on devices {list(self.devices)}" if self.epoch else ""
        return f"{name}{where}: {self.why}"


@dataclass(frozen=True, slots=True)
class ControlStatus:
    """What the control plane shows to a terminal view or a script.

    `granted_at`: unix seconds, by epoch. `holders`: the processes behind each active lease, by epoch. `trouble`: what
    keeps the control plane from granting anything, and what to do about it; empty while all is well. `endings`: the
    last ones, oldest first. `draining`: the nodes whose devices leave the pool as they become free, what people call
    them by id; `cordoned`: those of them that a person drained. `plans`: how many were made since the scheduler's
    process started, in `plan_s` seconds.
    """

    devices: tuple[Device, ...]
    pipelines: tuple[PipelineStatus, ...]
    leases: tuple[LeaseStatus, ...]
    waiting: tuple[Waiting, ...] = ()
    granted_at: Mapping[int, float] = field(default_factory=dict)
    holders: Mapping[int, tuple[Process, ...]] = field(default_factory=dict)
    trouble: str = ""
    endings: tuple[Ending, ...] = ()
    draining: Mapping[str, str] = field(default_factory=dict)
    cordoned: frozenset[str] = frozenset()
    plans: int = 0
    plan_s: float = 0.0

    @property
    def lent(self) -> frozenset[int]:
        """The devices that may be granted to somebody, once they are free."""
        return frozenset(device.id for device in self.devices if device.node_id not in self.draining)

    @property
    def drained(self) -> str:
        """ "host node3 is cordoned: `rlix uncordon node3` brings it back"; "" where no host is drained."""
        return "; ".join(
            f"host {name} is cordoned: `rlix uncordon {name}` brings it back"
            if node_id in self.cordoned
            else f"host {name} lends no devices: Ray drains it"
            for node_id, name in sorted(self.draining.items(), key=itemgetter(1))
        )
