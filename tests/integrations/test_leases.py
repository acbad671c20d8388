"""Stages and gates, without a trainer: what is on the device when, and ranks that go in and out together."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlix.engine.guarded import GuardedSet, named_tensors
from rlix.engine.movers import SwapMover
from rlix.integrations.leases import SCRIPT, Stage, Stages
from rlix.integrations.ranks import Desk, RankGate
from rlix.protocol.errors import NotResidentError, RlixError
from rlix.protocol.types import Phase

A, B = Stage("a", Phase.OLD_LOG_PROBS), Stage("b", Phase.ACTOR_TRAINING)
CPU = torch.device("cpu")


class Gate:
    def __init__(self, refuses: str = "") -> None:
        self.did: list[str] = []
        self.left = threading.Event()
        self._refuses = refuses

    def enter(self, phase: Phase, *, alone: bool = False) -> tuple[int, ...]:
        if self._refuses:
            raise RlixError(self._refuses)
        self.did.append(phase.name)
        return (3,)

    def leave(self) -> None:
        self.did.append("leave")
        self.left.set()


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
            assert [each.result(300) for each in entered] == [(3,), (3,)]
            first = threads.submit(ranks[0].leave)
            assert not first.done()
            assert gate.did[-1] == "ACTOR_TRAINING"  # rank 1 is still there
            ranks[1].leave()
            first.result(300)
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


def test_single_ranks_get_one_lease_from_the_first_and_give_it_back_together() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    gate, together = Gate(), Gate()
    desk = Desk(2, store, gate)
    ranks = [RankGate(0, 2, store, together, desk), RankGate(1, 2, store, None)]
    for first in (0, 1):
        gate.left.clear()
        for rank in (first, 1 - first):
            assert ranks[rank].enter(SCRIPT.phase, alone=True) == (3,)
        ranks[first].leave()
        ranks[1 - first].leave()
        assert gate.left.wait(300)
    assert gate.did == ["VALUE_COMPUTE", "leave"] * 2
    assert not together.did
    desk.close(lambda rank: True, 0.0)
    with pytest.raises(RlixError, match="rank 1 gets no lease: rank 0 has left the pool"):
        ranks[1].enter(SCRIPT.phase, alone=True)


def test_what_the_program_touches_between_stages_it_has_until_it_is_idle() -> None:
    gate, now = Gate(), [0.0]
    stages = Stages(gate, clock=lambda: now[0], idle_s=5.0)
    stages.close()  # nobody looks but this test
    stages.begin(A)
    policy, guarded = a_set("policy")
    guarded.lend = stages.lent
    view, weight = policy.weight.data, policy.weight.detach().clone()
    stages.add(guarded)
    stages.end()
    assert torch.equal(view, weight)  # it was taken before, and is guarded, too
    now[0] = 4.0
    policy.weight.sum()
    now[0] = 8.0
    assert (stages.end_if_idle(), stages.stage) == (False, SCRIPT)
    now[0] = 9.0
    output = policy(torch.ones(1, 2))
    now[0] = 20.0
    assert not stages.end_if_idle()  # it can run backward
    output.sum().backward()
    assert not stages.end_if_idle()  # nobody guards the gradient
    policy.zero_grad()
    del output
    assert (stages.end_if_idle(), stages.stage, guarded.device_bytes) == (True, None, 0)
    assert torch.equal(view, weight)
    stages.begin(B)
    assert gate.did == ["OLD_LOG_PROBS", "leave", *["VALUE_COMPUTE", "leave"] * 2, "ACTOR_TRAINING"]
