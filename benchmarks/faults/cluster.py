"""What happens to hosts, to a pool over three of them, each with light jobs of its own and one over all."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Self

import psutil
import ray

from benchmarks.faults.campaign import RECOVERY_S, Campaign, host_of, until
from benchmarks.faults.network import HOSTS, Network, jobs_on, locks_of
from benchmarks.faults.pool import Pool, actor
from benchmarks.faults.table import Fault
from rlix.control.init import init, shutdown
from rlix.control.rpc import Patient
from rlix.control.settings import Settings
from rlix.node.device_lock import LockRecord, holder
from rlix.node.process import state
from rlix.protocol.events import LeaseGranted
from rlix.protocol.messages import Device, NodeState, Process
from rlix.protocol.types import ORCHESTRATOR_ACTOR_NAME

_OTHERS = tuple(range(2, HOSTS + 1))  # the first has Ray's head and the control plane
_BACK_S = 120.0  # until a host's jobs have a device again: Ray and they have to start
_LOST_S = 60.0  # until Ray has given a host up, and its leases have ended
_ANSWER_S = 60.0
_LOSS = 2  # percent
SILENT_S = 20.0  # more than a host is cut off without being given up


def number_of(address: str) -> int:
    return int(address.rpartition(".")[2])


class HostsPool(Pool):
    """A control plane on the first host."""

    def __init__(self, settings: dict[str, float], network: Network) -> None:
        self.network, self.small_disk = network, False
        self.folder, self.home = jobs_on(1), Path(os.environ["RLIX_HOME"])
        self.locks = locks_of(1)
        self.settings = Settings.from_env()
        settings = {**settings, "silent_s": SILENT_S}
        self.settings = Settings(self.home, ray_address=self.settings.ray_address, **settings)  # type: ignore[arg-type]
        self.busy = {number: Lock() for number in range(1, HOSTS + 1)}  # hosts something is happening to

    def __enter__(self) -> Self:
        self.orchestrator = init(settings=self.settings, log_level="INFO")
        until(lambda: len({device.node_id for device in self.status().devices}) == HOSTS, _BACK_S)
        return self

    def __exit__(self, *_: object) -> None:
        shutdown()
        ray.shutdown()

    def ours(self) -> list[psutil.Process]:
        return []  # a host takes its processes with it

    def here(self) -> tuple[Device, ...]:
        return self.on(1)

    def on(self, number: int) -> tuple[Device, ...]:
        """The devices of a host."""
        return tuple(device for device in self.status().devices if number_of(device.node_ip) == number)

    def look(self, device: Device) -> LockRecord | None:
        """The processes of other hosts are not seen from here: that somebody has the lock is known all the same."""
        record = holder(device.key, locks_of(number_of(device.node_ip)))
        here = record is not None and number_of(device.node_ip) == 1
        return None if here and record is not None and not record.processes else record

    def signal(self, process: Process, number: signal.Signals) -> None:
        host = self._host_of(process)
        os.kill(process.pid, number) if host == 1 else self.network.kill(host, process.pid, number)

    def state(self, process: Process) -> str:
        host = self._host_of(process)
        return state(process) if host == 1 else str(self.network.state(host, process.pid))

    def _host_of(self, process: Process) -> int:
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return number_of(nodes[process.node_id])

    def alive(self, number: int) -> str:
        """The id of the host's node, as Ray counts it; "" while it does not."""
        nodes = [node for node in ray.nodes() if node["Alive"] and number_of(node["NodeManagerAddress"]) == number]
        return str(nodes[-1]["NodeID"]) if nodes else ""

    @contextmanager
    def one_host(self, run: Campaign, *numbers: int) -> Iterator[int]:
        """One of these hosts, to which nothing else happens meanwhile. Raises TimeoutError when there is none."""
        number = next((n for n in run.rng.sample(numbers, len(numbers)) if self.busy[n].acquire(blocking=False)), None)
        if number is None:
            raise TimeoutError("every host has something happening to it")
        try:
            yield number
        finally:
            self.busy[number].release()


def _pool(run: Campaign) -> HostsPool:
    assert isinstance(run.pool, HostsPool)
    return run.pool


def _works(run: Campaign, number: int, since: float) -> float | None:
    """When, in seconds after `since`, a job of the host's own was given a device there."""
    names: dict[str, str] = {}

    def granted(event: object) -> bool:
        if not isinstance(event, LeaseGranted):
            return False
        if event.lease.pipeline_id not in names:
            names.update(run.names())
        return host_of(names.get(event.lease.pipeline_id, "")) == str(number)

    return run.watcher.wait(since, granted, _BACK_S)


def _free(run: Campaign, number: int, devices: set[int], timeout_s: float) -> float | None:
    """Seconds until nobody has a lease on any of these devices."""
    at = time.time()
    held = until(lambda: not any(devices & set(status.lease.devices) for status in run.pool.status().leases), timeout_s)
    return time.time() - at if held else None


def cut(run: Campaign, *, seconds: float, head: bool = False) -> Fault:
    """A host that is not reached for so long, too short for Ray to give it up: nothing ends."""
    pool = _pool(run)
    with pool.one_host(run, *((1,) if head else _OTHERS)) as number:
        before = [pool.alive(n) for n in range(1, HOSTS + 1)]
        pool.network.cut(number)
        time.sleep(seconds)
        pool.network.heal(number)
        healed = time.time()
        works = _works(run, number, healed)
        stays = before == [pool.alive(n) for n in range(1, HOSTS + 1)]
    kind = f"{'head' if head else 'host'} cut off for {seconds:g} s"
    note = "" if stays else "Ray gave a host up"
    return Fault(kind, works, 0.0, run.grants_since(healed), works is not None and stays, note)


def lost(run: Campaign, *, seconds: float | None) -> Fault:
    """A host that Ray gives up: it is cut off for so long, or loses power. Then one joins in its place."""
    pool = _pool(run)
    with pool.one_host(run, *_OTHERS) as number:
        devices, at = {device.id for device in pool.on(number)}, time.time()
        pool.network.off(number) if seconds is None else pool.network.cut(number)
        given_up = until(lambda: not pool.alive(number), _LOST_S)
        noticed = time.time() - at
        ended = _free(run, number, devices, RECOVERY_S)
        grants = run.grants_since(time.time())
        time.sleep(max(0.0, (seconds or 0.0) - (time.time() - at)))
        joins = time.time()
        pool.network.ray(number)
        pool.network.jobs(number, run.rng.randrange(1 << 30))
        back = _works(run, number, joins)
        run.blame(str(number), at)
    kind = "host lost for ever, another joins" if seconds is None else f"host cut off for {seconds:g} s, comes back"
    note = f"its jobs had a device {back:.0f} s after Ray was started there" if back else "it was not used again"
    whole = None if ended is None else noticed + ended
    survived = given_up and ended is not None and grants is not None and back is not None
    return Fault(kind, whole, noticed, grants and noticed + (ended or 0.0) + grants, survived, note)


def between(run: Campaign, *, seconds: float, lossy: bool) -> Fault:
    """Two hosts that do not reach each other, or all of which some packets are lost between: nothing ends."""
    pool = _pool(run)
    with pool.one_host(run, *_OTHERS) as number:
        before = [pool.alive(n) for n in range(1, HOSTS + 1)]
        pool.network.lossy(_LOSS) if lossy else pool.network.apart(*_OTHERS)
        at = time.time()
        time.sleep(seconds)
        works = _works(run, number, at)
        pool.network.together()
        stays = before == [pool.alive(n) for n in range(1, HOSTS + 1)]
    kind = f"{_LOSS} % of the packets lost" if lossy else "two hosts apart"
    return Fault(f"{kind} for {seconds:g} s", works, 0.0, run.grants_since(at), works is not None and stays)


def drained(run: Campaign) -> Fault:
    """A host before maintenance: recovered when nobody has a device of it. Then it is in service again."""
    pool = _pool(run)
    with pool.one_host(run, *_OTHERS) as number:
        node, at = pool.alive(number), time.time()
        devices = {device.id for device in pool.on(number)}
        asked = Patient(lambda: actor(ORCHESTRATOR_ACTOR_NAME), "the orchestrator")
        asked.ask("cordon", node, True, timeout_s=_ANSWER_S)
        ended = _free(run, number, devices, RECOVERY_S)
        (said,) = [each for each in asked.ask("nodes", timeout_s=_ANSWER_S) if each.node_id == node]
        grants = run.grants_since(at)
        back_at = time.time()
        asked.ask("cordon", node, False, timeout_s=_ANSWER_S)
        back = _works(run, number, back_at)
        run.blame(str(number), at)
    survived = ended is not None and back is not None and said.state is NodeState.CORDONED
    return Fault(
        "host drained and back",
        ended,
        0.0,
        grants,
        survived,
        f"{said.state}, used again after {back:.0f} s" if back else "",
    )
