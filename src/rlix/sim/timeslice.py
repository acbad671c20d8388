"""Rollouts take turns on all devices in reach: the one that has used the fewest whole quanta goes first."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlix.scheduler.plan import Expand
from rlix.scheduler.policies.base import Pool


@dataclass(frozen=True, slots=True)
class Timeslice:
    """`quantum_gpu_s`: GPU-seconds a rollout is given before it is somebody else's turn."""

    quantum_gpu_s: float = 3600.0

    def divide(self, pool: Pool) -> Sequence[Expand]:
        def turn(index: int) -> tuple[int, int]:
            return int(pool.rollouts[index].served_gpu_s // self.quantum_gpu_s), index

        order = sorted((i for i, r in enumerate(pool.rollouts) if r.demand.trajectories), key=turn)
        rank = {index: place for place, index in enumerate(order)}
        taken: set[int] = set()
        expands = []
        for place, index in enumerate(order):
            rollout = pool.rollouts[index]
            number = 0
            for bundle, devices in enumerate(rollout.bundles):
                if number == rollout.demand.trajectories:
                    break
                if not taken.isdisjoint(devices) or not all(self._yields(pool, d, place, rank) for d in devices):
                    continue
                taken.update(devices)
                number += 1
                expands.append(Expand(rollout.pipeline_id, rollout.cluster, bundle))
        return expands

    @staticmethod
    def _yields(pool: Pool, device: int, place: int, rank: dict[int, int]) -> bool:
        """The device is free, the rollout's own, or held by one whose turn is later or that needs nothing."""
        if device in pool.free:
            return True
        at = pool.owner.get(device)
        return at is not None and rank.get(pool.holdings[at].rollout, len(rank)) >= place


timeslice = Timeslice()
