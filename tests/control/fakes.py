"""Small Ray actors that stand in for a job's rollout, its workers and its program."""

import os
import threading
from typing import Any

import ray

from rlix.control.client import JobClient
from rlix.control.rollout_lease import Granted, Lost, Taken
from rlix.node.device_lock import DeviceLocks
from rlix.node.process import this_process
from rlix.protocol.messages import Demand, Lease, Process
from rlix.protocol.types import Phase
from tests.waiting import HANG_S


class FakeRollout:
    """Uses bundles as told: `grow` False takes none up; `shrink` False gives none back. Keeps what happened to it."""

    def __init__(
        self, pipeline_id: str, cluster: str = "actor_infer", *, grow: bool = True, shrink: bool = True
    ) -> None:
        self._client = JobClient(pipeline_id)
        self._rollout = self._client.rollout(cluster)
        self._shrink = shrink
        self._told: list[tuple[str, Lease]] = []
        self._changed = threading.Condition()
        self._grow = threading.Event()
        if grow:
            self._grow.set()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._grow.wait()
        for change in self._rollout.changes():
            name = {Granted: "granted", Taken: "taken", Lost: "lost"}[type(change)]
            with self._changed:
                self._told.append((name, change.lease))
                self._changed.notify_all()
            if isinstance(change, Taken) and self._shrink:
                self._rollout.give_back(change.lease)

    def report(self, demand: Demand | int) -> None:
        self._rollout.report(demand)

    def take_up(self) -> None:
        self._grow.set()

    def told(self, name: str, count: int) -> list[Lease]:
        """All leases of the changes of this name, once they are at least `count`."""

        def found() -> list[Lease]:
            return [lease for kind, lease in self._told if kind == name]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= count, HANG_S):
                raise TimeoutError(f"{count} x {name} awaited, got {self._told}")
            return found()

    def process(self) -> Process:
        return this_process(ray.get_runtime_context().get_node_id(), "fake rollout")


class FakeWorker:
    """Holds a device, and asks for devices as a program would."""

    def process(self) -> Process:
        return this_process(ray.get_runtime_context().get_node_id(), "fake worker")

    def ping(self) -> int:
        return os.getpid()

    def lock(self, pipeline_id: str, lease: Lease) -> None:
        """Keeps bytes on the lease's devices, as far as anybody can see."""
        client = JobClient(pipeline_id)
        devices = client.devices()
        self.locks = DeviceLocks([devices[device].key for device in lease.devices])
        self.locks.acquire(client.fence(lease), HANG_S)

    def join(self, pipeline_id: str) -> None:
        JobClient(pipeline_id).join("fake program")

    def acquire(self, pipeline_id: str, cluster: str, phase: Phase) -> Any:
        self.client = JobClient(pipeline_id, poll_s=0.2)
        return self.client.acquire(cluster, phase)
