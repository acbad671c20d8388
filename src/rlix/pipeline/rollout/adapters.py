"""Rollouts of one adapter among others: the same replicas serve all of them from one model."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from rlix.engine.weights.publication import PublishedAdapter, PublishedWeights
from rlix.pipeline.rollout.rollout import RolloutError, RolloutManager
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.rollout.shares import Share
from rlix.protocol.messages import Demand


class Served:
    """What the replicas of a job serve: a model, and adapters that come, step and go. For any thread.

    Args:
        store: puts an adapter where replicas find it, for longer than the worker lives that it comes from.
    """

    def __init__(
        self, rollouts: RolloutManager, store: Callable[[PublishedAdapter], PublishedAdapter] = PublishedAdapter.stored
    ) -> None:
        self.rollouts, self._store = rollouts, store
        self._base: PublishedWeights | None = None
        self._adapters: dict[str, PublishedAdapter] = {}
        self._count = 0
        self._lock = threading.Lock()

    def serve(self, base: PublishedWeights) -> None:
        """Have this model, from the next adapter on."""
        with self._lock:
            self._base = base

    def serve_again(self, base: PublishedWeights) -> None:
        """The same model, published by workers that took the place of others: replicas that have it keep it."""
        with self._lock:
            if self._base is not None:
                self._base = replace(base, publication=self._base.publication)
                self._publish()

    def put(self, adapter: PublishedAdapter) -> None:
        """Generate with this version of the adapter from now on; nothing but the adapter moves."""
        with self._lock:
            self._adapters[adapter.name] = self._store(adapter)
            self._publish()

    def drop(self, name: str) -> None:
        """Serve it no longer."""
        with self._lock:
            if self._adapters.pop(name, None) is not None:
                self._publish()

    def _publish(self) -> None:
        if self._base is None:
            raise RuntimeError("an adapter was published before the model it belongs on")
        self._count += 1
        served = replace(self._base, version=self._count, adapters=tuple(self._adapters.values()))
        self.rollouts.publish(served)


class AdapterRollouts:
    """What a source and a schedule see of a job's rollouts: their own adapter's. `alone`: there are no others."""

    def __init__(self, served: Served, name: str, *, alone: bool = True) -> None:
        self._served, self._name, self._alone = served, name, alone
        self._rollouts = served.rollouts

    def publish(self, adapter: PublishedAdapter) -> None:
        self._served.put(adapter)

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]":
        return self._rollouts.submit(step, [self._own(trajectory) for trajectory in trajectories])

    @property
    def devices_s(self) -> float:
        return self._rollouts.devices_s

    def expect(self, demand: Demand, purpose: str = "") -> None:
        self._rollouts.expect(demand, purpose, self._name)

    def expect_gpu_s(self, left: float) -> None:
        if self._alone:
            self._rollouts.expect_gpu_s(left)

    @property
    def share(self) -> Share:
        return self._rollouts.share(self._name)

    def slot_use(self) -> dict[str, float]:
        """Nothing where others use the slots, too."""
        return self._rollouts.slot_use() if self._alone else {}

    @property
    def late_s(self) -> float:
        return self._rollouts.late_s

    def abandon(self, reason: Exception, purpose: str | None = "") -> None:
        self._rollouts.abandon(reason, purpose, self._name)

    def close(self) -> None:
        self._rollouts.close()

    def leave(self) -> None:
        """Nothing of the adapter is generated any more, and no replica has it."""
        self.abandon(RolloutError(f"run {self._name!r} has ended"), purpose=None)
        self._served.drop(self._name)

    def _own(self, trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, id=f"{self._name}:{trajectory.id}", adapter=self._name)
