"""`rlix.attach`: a plain script takes its share of the pool, in a line."""

import atexit
import contextlib
import logging
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType

import ray

from rlix.control.announcement import find_or_start_daemon
from rlix.control.client import JobClient, check_part
from rlix.control.init import init
from rlix.control.rollout_lease import LOCK_TIMEOUT_S, RolloutLease
from rlix.control.rpc import get
from rlix.control.settings import Settings
from rlix.node.device_lock import DeviceLocks
from rlix.node.process import this_process
from rlix.protocol.errors import DeadlockError, RlixError, SpecError
from rlix.protocol.messages import MOST_CLUSTERS, Demand, Device, Lease, Process
from rlix.protocol.types import ClusterName, Phase, pipeline_namespace

Size = int | str | Sequence[int] | Mapping[str, int] | None

logger = logging.getLogger(__name__)

_LONGEST_NAME = 64
_CALL_TIMEOUT_S = 30.0


def attach(
    name: str,
    gpus: Size = None,
    *,
    gangs: Mapping[str, Size] | None = None,
    rollouts: Mapping[str, Size] | None = None,
    tensor_parallel: Mapping[str, int] | None = None,
    stay: bool = False,
) -> "Program":
    """Makes this process a job of the pool; it stops being one when it ends, or at `close`.

    The control plane is that of RAY_ADDRESS, or the shared one of RLIX_HOME, which is started where there is none and
    ends a while after its last job.

    Args:
        name: what people see.
        gpus: devices of the gang `actor_train`: a number, a range `{"min": 4, "max": 8}` or `"4-8"`, or a list of
            ids. The job then has an elastic cluster `actor_infer` over the whole pool as well.
        gangs, rollouts: instead of `gpus`, clusters under names of your own, each with its devices; of a rollout None
            is the whole pool.
        tensor_parallel: devices of one bundle, by cluster; 1 where it is not said.
        stay: gangs are granted on the same devices each time, for programs that cannot change theirs.

    Raises:
        SpecError: sizes or names are wrong, or the pool is too small.
        RlixError: there is no control plane, and none could be started.
    """
    _check_name(name)
    if (gpus is None) == (not gangs and not rollouts):
        raise SpecError(f"rlix.attach({name!r}): say either gpus=8, or gangs={{...}} and rollouts={{...}}")
    for kind, given in (("gangs", gangs), ("rollouts", rollouts), ("tensor_parallel", tensor_parallel)):
        if given is not None and not isinstance(given, Mapping):
            raise SpecError(
                f"rlix.attach({name!r}): {kind} must be a dict by cluster, as {{'mine': 2}}, got {given!r:.80}"
            )
    gangs = {ClusterName.ACTOR_TRAIN.value: gpus} if gpus is not None else dict(gangs or {})
    rollouts = {ClusterName.ACTOR_INFER.value: None} if gpus is not None else dict(rollouts or {})
    if len(gangs) + len(rollouts) > MOST_CLUSTERS:
        named = f"{len(gangs) + len(rollouts)} are named"
        raise SpecError(f"rlix.attach({name!r}): a job has at most {MOST_CLUSTERS} clusters, and {named}")
    twice = sorted(gangs.keys() & rollouts.keys())
    if twice:
        raise SpecError(f"rlix.attach({name!r}): {twice} are named as gangs and as rollouts; use different names")
    sizes = {cluster: (tensor_parallel or {}).get(cluster, 1) for cluster in (*gangs, *rollouts)}
    unknown = sorted((tensor_parallel or {}).keys() - sizes.keys())
    if unknown:
        raise SpecError(f"rlix.attach({name!r}): tensor_parallel names {unknown}, which are no clusters of the job")
    settings = Settings.from_env()
    if not ray.is_initialized() and not settings.ray_address:
        find_or_start_daemon(settings.home, None)  # which other scripts find, too
    orchestrator = init()
    pipeline_id = str(
        get(orchestrator.allocate_pipeline_id.remote("job"), what="a pipeline id", timeout_s=_CALL_TIMEOUT_S)
    )
    register = orchestrator.register_pipeline.remote(
        pipeline_id=pipeline_id,
        ray_namespace=pipeline_namespace(pipeline_id),
        cluster_tp_configs=sizes,
        cluster_device_mappings={**gangs, **rollouts},
        name=name,
        elastic_clusters=list(rollouts),
        cluster_device_alternatives={gang: [] for gang in gangs} if stay else None,
        program=this_process(ray.get_runtime_context().get_node_id(), name),
    )
    get(register, what=f"registration of {name!r}", timeout_s=_CALL_TIMEOUT_S)
    get(orchestrator.admit_pipeline.remote(pipeline_id), what=f"admission of {name!r}", timeout_s=_CALL_TIMEOUT_S)
    sys.excepthook = partial(_on_uncaught, sys.excepthook)
    return Program(name, JobClient(pipeline_id))


def _on_uncaught(
    before: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Where a program waited inside RLix when Ctrl-C came, a traceback says nothing of the program."""
    stopped = issubclass(kind, KeyboardInterrupt)
    if stopped and error.args:
        sys.stderr.write(f"rlix: {error}\n")
    else:
        before(kind, error, trace)
    if stopped:
        sys.exit(128 + signal.SIGINT)  # Python itself forgets the interrupt over what Ray runs at exit


class LeaseLocks:
    """This process holds the device locks of its leases, as far as they are on its node."""

    def __init__(self, client: JobClient) -> None:
        self._client = client
        self._held: dict[int, DeviceLocks] = {}

    def take(self, lease: Lease, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        """Before the first byte. Raises DeviceBusyError, naming them, when others have bytes there for so long."""
        devices = self._client.devices()
        here = [devices[d].key for d in lease.devices if devices[d].node_id == self._client.process.node_id]
        locks = DeviceLocks(here)
        locks.acquire(self._client.fence(lease), timeout_s)
        self._held[lease.epoch] = locks

    def drop(self, lease: Lease) -> None:
        """After the last byte."""
        locks = self._held.pop(lease.epoch, None)
        if locks is not None:
            locks.release()

    def drop_part(self, lease: Lease, devices: Sequence[int]) -> None:
        """After the last byte on these of its devices."""
        locks = self._held.get(lease.epoch)
        if locks is not None:
            known = self._client.devices()
            locks.release([known[device].key for device in devices if device in known])  # others left with their node

    def drop_all(self) -> None:
        """The process ends, and with it all bytes that it still has anywhere."""
        while self._held:
            self._held.popitem()[1].release()


class Program:
    """A job that is this process. Its death is the job's end, and frees what it held.

    The process itself counts as the holder of every lease: what it does not give back in time is taken by ending it.
    `name_holders` names others, where others keep the bytes.
    """

    def __init__(self, name: str, client: JobClient) -> None:
        self.name = name
        self.client = client
        self.pipeline_id = client.pipeline_id
        self.registration = client.registration()
        self._locks = LeaseLocks(client)
        self._rollouts: weakref.WeakSet[RolloutLease] = weakref.WeakSet()
        for cluster in self.registration.clusters:
            ranks = range(len(cluster.bundles)) if cluster.elastic else range(1)
            client.name_holders(cluster.name, dict.fromkeys(ranks, client.process))
        self._close = weakref.finalize(self, _end, client, self._locks)
        self._close.atexit = False
        atexit.register(self._close)

    @contextlib.contextmanager
    def phase(
        self,
        phase: Phase,
        cluster: str | None = None,
        *,
        timeout_s: float | None = None,
        longest_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[Lease]:
        """Holds a gang's devices, and their locks, for the duration of the block.

        At its end this process must have no byte on them any more. `cluster` may be left out when there is one gang.
        Raises what `JobClient.acquire` raises (DeadlockError also when nobody would read a rollout's changes
        meanwhile), and DeviceBusyError when somebody outside the pool uses a device.
        """
        name = cluster or self._only(elastic=False)
        for rollout in self._rollouts:
            devices = [device for lease in rollout.unread_here() for device in lease.devices]
            if devices:
                raise DeadlockError(
                    f"{self.name}: this thread would wait for {name} while nobody reads the changes of "
                    f"{rollout.cluster}, which holds devices {devices}: give them back first, or read "
                    "rollout.changes() in a thread of its own"
                )
        with self.client.phase(name, phase, timeout_s, longest_s=longest_s, stop=stop) as lease:
            self._locks.take(lease)
            try:
                yield lease
            finally:
                self._locks.drop(lease)

    def give_back(self, lease: Lease, devices: Sequence[int]) -> Lease:
        """Within a `phase`: others may have these of its devices, on which no byte is any more. Returns what is left.

        Raises what `JobClient.give_back` raises.
        """
        check_part(lease, devices)
        self._locks.drop_part(lease, devices)
        return self.client.give_back(lease, devices)

    def rollout(self, cluster: str | None = None, *, demand: Demand | int = 0) -> RolloutLease:
        """The bundles of an elastic cluster, as they come and go; `cluster` may be left out when there is one.

        Raises:
            RlixError: this program has one of that cluster open: both would be told of the same bundles.
        """
        name = cluster or self._only(elastic=True)
        if any(other.cluster == name and not other.closed for other in self._rollouts):
            raise RlixError(f"{self.name}: a rollout of {name} is open already: use that one, or end its `with` block")
        rollout = RolloutLease(self.client, name, self._locks)
        rollout.report(demand)  # what is refused is not open
        self._rollouts.add(rollout)
        return rollout

    def devices(self, cluster: str | None = None) -> tuple[Device, ...]:
        """Those that a gang, which may be left out when there is one, was placed on, in rank order."""
        known, name = self.client.devices(), cluster or self._only(elastic=False)
        return tuple(known[device] for device in self.registration.cluster(name).devices)

    def metrics(self, step: int, steps: int = 0, **values: object) -> None:
        """Says how far the program is: `step` steps are done, of `steps` where that is known, and what was measured.

        `rlix status` and the page show it. It is one short call; where nobody answers, the program goes on.
        """
        self.progress(step, steps, values)

    def progress(self, step: int, steps: int, values: Mapping[str, object]) -> None:
        """`metrics`, of which any may be called as it likes."""
        try:
            self.client.report_progress(step, steps, values)
        except RlixError as error:
            logger.warning("%s: its metrics of step %d are not shown: %s", self.name, step, error)

    def name_holders(self, cluster: str, processes: Mapping[int, Process]) -> None:
        """Other processes than this one keep the bytes of a cluster; see `JobClient.name_holders`."""
        self.client.name_holders(cluster, processes)

    def close(self) -> None:
        """Leaves the pool. Calling it twice is fine."""
        atexit.unregister(self._close)
        self._close()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _only(self, *, elastic: bool) -> str:
        names = [cluster.name for cluster in self.registration.clusters if cluster.elastic is elastic]
        if len(names) != 1:
            kind = "elastic cluster" if elastic else "gang"
            raise SpecError(f"job {self.name!r} has {len(names)} {kind}s ({', '.join(names)}): say which one")
        return names[0]


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise SpecError(f"rlix.attach: the name must be 1 to {_LONGEST_NAME} printable characters, got {name!r:.80}")


def _end(client: JobClient, locks: LeaseLocks) -> None:
    """What is still held is given back first: whoever leaves the pool and keeps a device locked is ended."""
    locks.drop_all()
    if ray.is_initialized():
        with contextlib.suppress(RlixError):
            client.unregister("its program ended")
