"""A rollout outside a job's pipeline: on bundles as they come and go, or for a while on those of a gang."""

from collections.abc import Sequence, Set
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from math import inf
from threading import Event

from rlix.control.client import JobClient
from rlix.engine.inference.engine import InferenceEngine
from rlix.engine.weights.publication import PublishedWeights
from rlix.node.run_folder import RunFolder
from rlix.pipeline.rollout.bundle_feed import started
from rlix.pipeline.rollout.router import Trajectory
from rlix.protocol.errors import RlixError, WaitTimeoutError
from rlix.protocol.messages import Cluster, Lease


class SharedRollout:
    """The replicas of an engine, one for each bundle of an elastic cluster and none of them loaded."""

    def __init__(
        self, engine: InferenceEngine, cluster: Cluster, client: JobClient, slots: int, folder: RunFolder
    ) -> None:
        self._engine, self._cluster = engine, cluster
        self._manager, self._bundles = started(engine, cluster, client, slots, folder)
        self._stop = Event()
        self._gang: list[Lease] = []

    def publish(self, weights: PublishedWeights) -> None:
        self._manager.publish(weights)

    def generate(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Finish them, however long that takes: whoever waits looks at `devices_s`. Raises what the manager raises."""
        self._manager.generate(step, trajectories, inf, self._stop)

    @property
    def devices_s(self) -> float:
        return self._manager.devices_s

    @property
    def worked_s(self) -> float:
        return self._manager.decoding_s

    @property
    def is_open(self) -> bool:
        return self._manager.is_open

    @property
    def leases(self) -> Set[int]:
        return {lease.epoch for lease in self._bundles.usable}

    @property
    def holds(self) -> bool:
        return any(lease.bundle in self._manager.held for lease in self._gang)

    def hold(self, gang: Lease) -> None:
        there = [(n, bundle) for n, bundle in enumerate(self._cluster.bundles) if {*bundle} <= {*gang.devices}]
        self._gang = [replace(gang, bundle=number, devices=bundle) for number, bundle in there]
        self._manager.grow(self._gang)

    def let_go(self, timeout_s: float) -> None:
        if not self._gang or self._stop.is_set():  # the replicas have ended then
            return
        if wait(self._manager.request_shrink(self._gang), timeout_s).not_done:
            raise WaitTimeoutError(f"{self._cluster.name}: replicas did not leave their devices within {timeout_s:g} s")
        self._gang = []

    def close(self) -> None:
        """End the replicas, and give back what they had."""
        self._stop.set()
        self._bundles.close()
        self._manager.close()
        self._engine.close()
        with suppress(RlixError):  # its processes have ended, which frees the devices in any case
            self._bundles.leave()
