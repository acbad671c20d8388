"""Parts that work in the program itself: beside an engine, whose processes have the devices."""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar, Protocol, Self

import ray

from rlix.control.client import JobClient
from rlix.flow.parts.flow_worker import FlowWorker, Piece, apart
from rlix.flow.parts.logged import Sums
from rlix.node.devices import smallest_memory
from rlix.node.pinned_memory import memory_bytes
from rlix.node.run_folder import RunFolder
from rlix.protocol.errors import WaitTimeoutError
from rlix.protocol.messages import Cluster, Device, DeviceKind, Fence, Lease, Process

_LOOK_S = 0.2


class LocalWorker(FlowWorker):
    """One object for the whole part, however wide the plan makes it. `onload` and `offload` move what its engine holds.

    `devices` are the part's, `lease` is what it uses them under (None: the program's own account).
    """

    elastic: ClassVar[bool] = False
    """Whether it can work on devices that come and go; then it has `share`."""
    devices: tuple[Device, ...] = ()
    lease: Fence | None = None
    named: Callable[[], object] = staticmethod(lambda: None)
    """To be called when `processes` are others, before these use a device."""
    measured = False
    """Whether only the time counts: what it learns goes nowhere."""

    def begin(self) -> None:
        """Start what needs no device."""

    def share(self, client: JobClient, cluster: Cluster, folder: RunFolder) -> "Shared":
        """Its devices are those of this elastic cluster, of which it has from now on what the pool says, without a
        `lease`: `onload` and `offload` say only when it works."""
        raise NotImplementedError

    def clock(self) -> float:
        """Seconds, of which calls may take so many: those in which it had a device."""
        return time.monotonic()

    def room(self) -> float:
        """Bytes of the smallest device of this host, which has some of the engine's; a virtual one's is the host's."""
        if any(device.kind is not DeviceKind.CUDA for device in self.devices):
            return float(memory_bytes())
        return float(smallest_memory(self.devices) or "inf")

    def step_begins(self, number: int) -> None:
        """Which step the next items are of; it may be one that failed before."""

    @property
    def processes(self) -> Mapping[int, Process]:
        """That use the devices, by rank."""
        return {}

    def close(self) -> None:
        """End them, whatever they do."""


class Shared(Protocol):
    """What a part does on devices that come and go."""

    @property
    def is_open(self) -> bool:
        """Whether it has something to do."""
        ...

    @property
    def worked_s(self) -> float:
        """Seconds for which its replicas have worked so far, all of them together."""
        ...

    @property
    def leases(self) -> Set[int]:
        """Epochs of what comes and goes, as far as it may use it now."""
        ...

    @property
    def holds(self) -> bool:
        """Whether it is on devices of the gang."""
        ...

    def hold(self, gang: Lease) -> None:
        """It has these devices until it is told to let go, beside those that come and go."""
        ...

    def let_go(self, timeout_s: float) -> None:
        """Of the gang, if it has one. Raises WaitTimeoutError: its bytes are there still."""
        ...


class LocalCall:
    """A method that runs in a thread of the group."""

    def __init__(
        self, name: str, method: str, future: "Future[Any]", timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._name, self._method, self._future, self._timeout_s = name, method, future, timeout_s
        self._clock = clock

    @property
    def late(self) -> list[int]:
        return [] if self._future.done() else [0]

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Raises what the method raised, and WaitTimeoutError: not ended within `timeout_s` (None: the group's)."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = self._clock() + limit
        while not wait([self._future], min(limit, _LOOK_S)).done:
            if self._clock() >= deadline:
                raise WaitTimeoutError(f"{self._name}: {self._method}() did not end within {limit:g} s")
        return [self._future.result()]


class LocalGroup:
    """As `PartGroup`, of one worker that is in this process. What does not answer in time has its processes ended."""

    world_size = 1

    def __init__(self, worker: LocalWorker, devices: Sequence[Device], name: str, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.worker, self.lost = worker, list[int]()
        self.logged: list[Sums] = []
        self._threads = ThreadPoolExecutor(1, name)
        self._latest: LocalCall | None = None
        worker.devices = tuple(devices)
        try:
            self.ask("begin")
        except BaseException:  # raised again; nothing is left behind
            self.close()
            raise

    @property
    def lease(self) -> Fence | None:
        return self.worker.lease

    @lease.setter
    def lease(self, lease: Fence | None) -> None:
        self.worker.lease = lease

    @property
    def processes(self) -> Mapping[int, Process]:
        return self.worker.processes

    @property
    def late(self) -> list[int]:
        return [] if self._latest is None else self._latest.late

    def _call(self, method: str, *args: Any) -> LocalCall:
        future = self._threads.submit(getattr(self.worker, method), *args)
        return self._noted(method.removeprefix("_rlix_"), future)

    def _noted(self, method: str, future: "Future[Any]") -> LocalCall:
        self._latest = LocalCall(self.name, method, future, self.timeout_s, self.worker.clock)
        return self._latest

    def ask(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        return self._call(method, *args).wait()

    def onload(self) -> None:
        self.answers(self._call("onload"))

    def offload(self) -> None:
        if not self.lost:
            self.answers(self._call("offload"))

    def part(
        self, method: str, inputs: Sequence[Sequence[Sequence[Piece]]], ranks: Sequence[int] | None = None
    ) -> tuple[list[Any], LocalCall]:
        """The list of references is filled when the call has been answered."""
        refs: list[Any] = []

        def work() -> tuple[int, Sums]:
            bounds, given = apart(inputs[0])
            made, told = self.worker._rlix_part(method, bounds, 0, *ray.get(given))
            refs.append(ray.put(made))
            return told

        return refs, self._noted(method, self._threads.submit(work))

    def counts(self, call: LocalCall) -> list[int]:
        """As of a `PartGroup`."""
        ((count, logged),) = self.answers(call)
        self.logged.append(logged)
        return [count]

    def answers(self, call: LocalCall, timeout_s: float | None = None) -> list[Any]:
        """What the call's `wait` returns. Raises what that raises; after a timeout its processes were ended."""
        try:
            return call.wait(timeout_s)
        except WaitTimeoutError as error:
            self.end()
            raise WaitTimeoutError(f"{error}, and its processes were ended") from None

    def end_late(self) -> None:
        if self.late:
            self.end()

    def end(self) -> None:
        """End its processes, so that others can have the devices."""
        self.lost = [0]
        self.worker.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
