"""Whom a training engine names as holders of its devices, with workers that are not there."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.engine.train import lifecycle
from rlix.engine.train.engine import TrainEngine
from rlix.protocol.errors import WorkerError
from rlix.protocol.messages import Device, DeviceKind, Process
from tests.engine.training_models import policy

DEVICES = tuple(Device(number, "node", "127.0.0.1", number, DeviceKind.CPU) for number in range(3))


class Workers:
    """A group whose setup fails on the last device."""

    def __init__(self, _: type, *, name: str, placements: Sequence[tuple[Device, ...]], **__: Any) -> None:
        self.world_size = len(placements)
        self.processes = {rank: Process("node", device.id, 1, name) for rank, (device,) in enumerate(placements)}

    def run(self, method: str, *_: Any, **__: Any) -> list[Any]:
        if method == "setup" and any(process.pid == DEVICES[-1].id for process in self.processes.values()):
            raise WorkerError("setup failed")
        return [SimpleNamespace(parameters=1)] if method == "setup" else []

    def call(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def results(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def close(self, **_: Any) -> None: ...


def test_holders_are_named_before_they_begin_and_again_when_they_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "WorkerGroup", Workers)
    named: list[int] = []
    with TrainEngine(policy()).build(
        devices=DEVICES[:1], seed=1, name_holders=lambda processes: named.append(processes[0].pid)
    ) as engine:
        engine.resize(devices=DEVICES[1:2])
        with pytest.raises(WorkerError, match="setup failed"):
            engine.resize(devices=DEVICES[2:])
    assert named == [0, 1, 2, 1]
