"""The state of a part that says nothing of it: brought off and on in its stead, and looked for on real devices."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlix.flow.parts import own_state
from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.parts.local import LocalWorker
from rlix.node.pinned_memory import memory_bytes
from rlix.protocol.errors import NotResidentError, RlixError
from rlix.protocol.messages import Device, DeviceKind


class Learns(FlowWorker):
    def __init__(self) -> None:
        self.model = nn.Linear(2, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.kept = {"mean": torch.zeros(4)}

    def run(self, items: list[int]) -> list[float]:
        loss = self.model(torch.ones(2)).sum()
        loss.backward()
        self.optimizer.step()
        self.kept["mean"] += 1
        return [loss.item() for _ in items]

    def save(self) -> Any:
        return self.model.state_dict()

    def restore(self, state: Any) -> None:
        assert self._own is not None and self._own.on_device  # or an optimizer's state is loaded into host memory
        self.model.load_state_dict(state)


class Locks:
    held = False

    def acquire(self, *_: object) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False


def placed(worker: FlowWorker, kind: str = "cpu") -> Locks:
    locks: Any = Locks()
    worker.ctx = SimpleNamespace(  # type: ignore[assignment]
        group="part", devices=(1,), kind=kind, device_locks=lambda: locks, fence=lambda lease: lease
    )
    worker._rlix_begin()
    return locks  # type: ignore[no-any-return]


def test_what_attributes_hold_comes_and_goes_and_is_not_touched_meanwhile() -> None:
    torch.manual_seed(0)
    worker, alone = Learns(), Learns()
    alone.model.load_state_dict(worker.model.state_dict())
    locks = placed(worker)
    for touched in (lambda: worker.model(torch.ones(2)), lambda: worker.kept["mean"] + 1):
        with pytest.raises(NotResidentError, match=r"(weight' of part|kept mean of part) was touched"):
            touched()
    assert worker.memory() == (0.0, 0.0)
    for turn in range(3):
        worker._rlix_onload(None)
        assert worker.run([1]) == alone.run([1])
        if turn == 2:  # weights, gradients and two moments of 9 numbers, two counts of steps, and the mean
            assert worker.memory()[0] == 4 * (4 * 9 + 2 + 4)
        worker._rlix_offload(turn + 1)
        assert worker.memory() == (0.0, 0.0) and not locks.held
        with pytest.raises(NotResidentError, match="optimizer state 'exp_avg'"):
            worker.optimizer.state[worker.model.weight]["exp_avg"] + 1


class Keeps(FlowWorker):
    def __init__(self) -> None:
        self.array = np.zeros(2)
        self.seen = torch.from_numpy(self.array)
        self.sparse = torch.eye(2).to_sparse()
        self.tree: dict[str, Any] = {}
        self.tree["up"] = self.tree
        self.list = [torch.ones(2), self.tree]


def test_what_is_not_torchs_alone_stays_as_it_is() -> None:
    worker = Keeps()
    placed(worker)
    worker.array[:] = 1  # nobody asks the tensor: numpy has the bytes, too
    assert worker.seen.tolist() == [1, 1]
    with pytest.raises(NotResidentError, match="list of part"):
        worker.list[0] + 1
    worker._rlix_onload(None)
    assert worker.memory()[0] == 8 and torch.equal(worker.sparse.to_dense(), torch.eye(2))


def test_between_turns_a_state_is_saved_and_restored() -> None:
    worker, other = Learns(), Learns()
    placed(worker)
    placed(other)
    saved = worker._rlix_save()
    other._rlix_restore(saved)
    with pytest.raises(NotResidentError):
        other.model.weight + 1
    other._rlix_onload(None)
    worker._rlix_onload(None)
    assert torch.equal(other.model.weight, worker.model.weight)
    assert torch.equal(saved["weight"], worker.model.weight)


def test_the_room_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine = Learns(), LocalWorker()
    placed(worker)
    engine.devices = (Device(0, "here", "::1", 0, DeviceKind.CPU),)
    assert worker.room() == engine.room() == memory_bytes()
    monkeypatch.setattr("rlix.node.devices.machine_memory", lambda: 80)
    engine.devices = (Device(0, "here", "::1", 0, DeviceKind.CUDA),)
    assert engine.room() == 80.0


@pytest.mark.parametrize("left", [0, own_state.SMALL + 1])
def test_a_real_device_does_not_pass_on_with_bytes_on_it(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    class Forgets(FlowWorker):
        def offload(self) -> None: ...

    monkeypatch.setattr(own_state, "left_behind", lambda: left)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    worker = Forgets()
    locks = placed(worker, "cuda")
    worker._rlix_onload(None)
    if left:
        with pytest.raises(RlixError, match=r"^offload\(\) left 32 MiB on its device: bring off all of it, or"):
            worker._rlix_offload(1)
    else:
        worker._rlix_offload(1)
    assert locks.held is bool(left)


def test_a_part_that_never_used_its_real_device_has_nothing_there() -> None:
    worker = Learns()
    placed(worker, "cuda")
    worker._rlix_onload(None)
    assert worker.memory() == (0.0, 0.0)
    worker._rlix_offload(1)
    assert worker._own is None  # it would begin with CUDA, which takes memory
