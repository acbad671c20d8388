"""Stages and gates, without a trainer: what is on the device when, and ranks that go in and out together."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlix.engine.guarded import GuardedSet, named_tensors
from rlix.engine.movers import SwapMover
from rlix.integrations.leases import RankGate, Stage, Stages
from rlix.protocol.errors import NotResidentError, RlixError
from rlix.protocol.types import Phase

A, B = Stage("a", Phase.OLD_LOG_PROBS), Stage("b", Phase.ACTOR_TRAINING)
CPU = torch.device("cpu")


class Gate:
    def __init__(self, refuses: str = "") -> None:
        self.did: list[str] = []
        self._refuses = refuses

    def enter(self, phase: Phase) -> tuple[int, ...]:
        if self._refuses:
            raise RlixError(self._refuses)
        self.did.append(phase.name)
        return (3,)

    def leave(self) -> None:
        self.did.append("leave")


def a_set(name: str) -> tuple[torch.nn.Module, GuardedSet]:
    module = torch.nn.Linear(2, 2)
    return module, GuardedSet(name, lambda: named_tensors(module), CPU, mover=SwapMover(CPU))


def test_a_stage_has_what_it_needs_and_the_one_before_gets_back_what_it_had() -> None:
    gate = Gate()
    stages = Stages(gate)
    stages.begin(A)
    (policy, first), (_, second) = a_set("policy"), a_set("reference")
    weight = policy.weight.detach().clone()
    stages.add(first, second)
    stages.begin(B, first)
    assert (first.on_device, second.on_device) == (True, False)
    with stages.within(A, second):
        assert (first.on_device, second.on_device) == (False, True)
    assert (stages.stage, first.on_device, second.on_device) == (B, True, False)
    assert torch.equal(policy.weight, weight)
    stages.end()
    assert gate.did == ["OLD_LOG_PROBS", "leave", "ACTOR_TRAINING", "leave", "OLD_LOG_PROBS", "leave",
                        "ACTOR_TRAINING", "leave"]  # fmt: skip
    with pytest.raises(NotResidentError, match="parameter 'weight' of policy was touched"):
        policy(torch.ones(1, 2))
    with stages.readable():
        assert torch.equal(policy.weight, weight)


def test_what_raises_in_a_stage_ends_it() -> None:
    gate = Gate()
    stages = Stages(gate)
    with pytest.raises(ValueError, match="no"), stages.within(A):
        raise ValueError("no")
    assert (stages.stage, gate.did) == (None, ["OLD_LOG_PROBS", "leave"])


def test_ranks_hold_a_lease_together() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    gate = Gate()
    ranks = [RankGate(rank, 2, store, gate if rank == 0 else None) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            entered = [threads.submit(rank.enter, Phase.ACTOR_TRAINING) for rank in ranks]
            assert [each.result(20) for each in entered] == [(3,), (3,)]
            first = threads.submit(ranks[0].leave)
            assert not first.done()
            assert gate.did[-1] == "ACTOR_TRAINING"  # rank 1 is still there
            ranks[1].leave()
            first.result(20)
            assert gate.did[-1] == "leave"


def test_a_refusal_and_a_disagreement_reach_the_other_ranks() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(RlixError, match="too small"):
        RankGate(0, 2, store, Gate("the pool is too small")).enter(Phase.ACTOR_TRAINING)
    with pytest.raises(RlixError, match="rank 0 got no lease: the pool is too small"):
        RankGate(1, 2, store, None).enter(Phase.ACTOR_TRAINING)
    other: Any = dist.HashStore()  # type: ignore[attr-defined]
    RankGate(0, 2, other, Gate()).enter(Phase.ACTOR_TRAINING)
    with pytest.raises(RlixError, match="rank 1 is about to do OLD_LOG_PROBS while rank 0 does ACTOR_TRAINING"):
        RankGate(1, 2, other, None).enter(Phase.OLD_LOG_PROBS)
