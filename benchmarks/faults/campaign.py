"""What every injection uses: the pool, who watches it, a probe that asks for a device, and victims."""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from benchmarks.faults.light import LightJobs
from benchmarks.faults.pool import Pool, actor
from benchmarks.faults.table import Fault
from benchmarks.faults.watcher import Watcher
from rlix.control.client import JobClient
from rlix.protocol.errors import RlixError
from rlix.protocol.events import Event, LeaseGranted, LeaseReleased, PipelineEnding, PipelineRegistered
from rlix.protocol.messages import Lease, Process
from rlix.protocol.types import Phase, pipeline_namespace

RECOVERY_S = 45.0
_POLL_S = 0.01
_CHOOSING_S = 5.0
STOP_NAMES = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}


@dataclass
class Campaign:
    pool: Pool
    watcher: Watcher
    rng: random.Random
    light: LightJobs | None = None
    faults: list[Fault] = field(default_factory=list)
    blamed: list[tuple[str, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.probe_id = self.register("probe", {"probe": [self.pool.here()[0].id]})
        self.probe = JobClient(self.probe_id, poll_s=1.0)

    def blame(self, whom: str, since: float) -> None:
        """Whoever of the pipeline, or of the host of that name, ends from `since` on (unix seconds) may have to."""
        self.blamed.append((whom, since, time.time()))

    def names(self) -> dict[str, str]:
        """What people call the pipelines there were, by id."""
        events = (event for _, event in self.watcher.events_since(0.0))
        return {e.registration.pipeline_id: e.registration.name for e in events if isinstance(e, PipelineRegistered)}

    def innocent(self, over: float) -> list[str]:
        """Light jobs that ended before `over` although nothing had happened to them, or to their host."""
        names, found = self.names(), []
        for at, event in self.watcher.events_since(0.0):
            name = names.get(event.pipeline_id, "") if isinstance(event, PipelineEnding) else ""
            if not name.startswith(("crew", "script", "wide")) or at > over:
                continue
            assert isinstance(event, PipelineEnding)
            blamed = [b for b in self.blamed if b[0] in (event.pipeline_id, host_of(name)) or name == "wide"]
            if not any(since - 1.0 <= at <= until_ + RECOVERY_S for _, since, until_ in blamed):
                found.append(f"{name} ({event.pipeline_id}) at {at:.1f}: {event.reason}")
        return found

    def register(self, name: str, gangs: dict[str, Any]) -> str:
        """A pipeline without a program."""
        orchestrator = self.pool.orchestrator
        pipeline_id = str(ray.get(orchestrator.allocate_pipeline_id.remote("probe"), timeout=60))
        register = orchestrator.register_pipeline.remote(
            pipeline_id=pipeline_id,
            ray_namespace=pipeline_namespace(pipeline_id),
            cluster_tp_configs=dict.fromkeys(gangs, 1),
            cluster_device_mappings=gangs,
            name=name,
        )
        ray.get(register, timeout=60)
        ray.get(orchestrator.admit_pipeline.remote(pipeline_id), timeout=60)
        return pipeline_id

    def grants_since(self, at: float) -> float | None:
        """When, in seconds after `at`, the pool has granted a device to somebody who asked just now."""
        with contextlib.suppress(TimeoutError):
            lease = self.probe.acquire("probe", Phase.INITIALIZATION, RECOVERY_S)
            took = time.time() - at
            self.probe.release(lease)
            return took
        return None

    # -- victims

    def holder_of(self, wanted: Callable[[Lease], bool], timeout_s: float = 30.0) -> tuple[Lease, Process]:
        """Somebody who has bytes on a device now, under a lease of this kind."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            known = self.pool.status()
            leases = [s.lease for s in known.leases if s.lease.epoch in self.watcher.active() and wanted(s.lease)]
            self.rng.shuffle(leases)
            for lease in leases:
                processes = [p for p in known.holders.get(lease.epoch, ()) if p != self.probe.process]
                if processes and self.pool.state(victim := self.rng.choice(processes)) == "running":
                    return lease, victim
            time.sleep(_POLL_S)
        raise TimeoutError("nobody to be the victim")

    def hit(self, kind: str, lease: Lease, victim: Process, number: signal.Signals) -> Fault:
        """Kills or stops a process that holds a lease; recovered when the lease's devices are free for others."""
        at = time.time()
        self.pool.signal(victim, number)
        self.blame(lease.pipeline_id, at)
        earliest = at - _CHOOSING_S  # it may have ended by itself in the moment since it was chosen
        ended = self.watcher.wait(
            earliest, lambda e: isinstance(e, LeaseReleased) and e.epoch == lease.epoch, RECOVERY_S
        )
        ended = None if ended is None else max(0.0, ended - _CHOOSING_S)
        noticed = 0.0
        if number == signal.SIGSTOP and ended is not None:
            noticed = self.noticed(at, lease.epoch, ended)
        return Fault(
            f"{kind} {STOP_NAMES[number]}",
            ended,
            noticed,
            self.granted_to_next(at + (ended or 0.0), lease, at),
            ended is not None,
        )

    def noticed(self, at: float, epoch: int, ended: float) -> float:
        """When the control plane began to take a lease."""
        found = [t - at for t, e in self.watcher.events_since(at) if getattr(e, "epoch", None) == epoch]
        return min([*found, ended])

    def granted_to_next(self, since: float, lease: Lease, at: float) -> float | None:
        def wanted(event: Event) -> bool:
            return isinstance(event, LeaseGranted) and bool(set(event.lease.devices) & set(lease.devices))

        after = self.watcher.wait(since - 0.001, wanted, 1.0)
        return None if after is None else since + after - at

    # -- the control plane's own actors

    def answers(self, name: str, before: Process, at: float) -> float | None:
        """When, in seconds after `at`, another process answered under the actor's name."""
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(GetTimeoutError, RayError, ValueError):
                if ray.get(actor(name).process.remote(), timeout=0.5) != before:
                    return time.time() - at
            time.sleep(_POLL_S)
        return None


def host_of(name: str) -> str:
    """Of a light job, by what it is called."""
    return name.rpartition("-")[2]


class Waits:
    """Looks once a second, in a thread until `close`, whether everybody who waits is told for what."""

    def __init__(self, pool: Pool) -> None:
        self.looks, self.unexplained = 0, list[str]()
        self._pool = pool
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _look(self) -> None:
        while not self._stop.wait(1.0):
            with contextlib.suppress(GetTimeoutError, RayError, RlixError):
                waiting = self._pool.status(5.0).waiting
                self.looks += len(waiting)
                self.unexplained += [str(each) for each in waiting if not each.behind]


def until(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@contextlib.contextmanager
def cleanup(action: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    finally:
        action()
