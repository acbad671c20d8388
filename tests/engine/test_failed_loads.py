"""A load that fails and leaves nothing on a device holds no device either."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions
from rlix.engine.inference.replica import Replica
from rlix.engine.life_cycle import SOURCE, Life, Part, Phase
from rlix.engine.model_source import ModelSource
from rlix.engine.movers import VirtualMover
from rlix.engine.residency import ResidentSet
from rlix.engine.train.worker import TrainWorker
from rlix.protocol.errors import DeviceBusyError, RlixError, WeightSyncError
from rlix.protocol.messages import DeviceKind, Fence
from tests.engine.models import qwen

FENCE = Fence("pool", 0, "a program")


class Locks:
    keys = ("virtual-1",)

    def __init__(self) -> None:
        self.fence: Fence | None = None

    def acquire(self, fence: Fence, timeout_s: float) -> None:
        self.fence = fence

    def release(self) -> None:
        self.fence = None


class Refusing:
    """An executor whose loads fail, and leave it in this state."""

    after = Life()

    def __init__(self, *_: object) -> None:
        self.life = Life()

    def change(self, step: Any) -> None:
        self.life = step(self.life)

    def share_locks(self, keys: Sequence[str], fence: Fence | None) -> None: ...

    def load(self, *_: object) -> int:
        self.life = self.after
        raise WeightSyncError("they do not fit")


def context() -> Any:
    return SimpleNamespace(
        device_locks=Locks,
        kind=DeviceKind.CPU,
        rendezvous=None,
        rank=0,
        group="a group",
        namespace=None,
        fence=lambda _: FENCE,
    )


SERVING = Life().brought(*Part).filled(SOURCE)
HOST = SERVING.released(keep_host=True)


@pytest.mark.parametrize(
    ("after", "held"),
    [
        (Life(), None),
        (HOST, None),
        (HOST.failed("no room"), None),
        (SERVING, FENCE),
        (SERVING.failed("half-way"), FENCE),
        (SERVING.failed("dropped, or not", *Part), FENCE),
    ],
)
def test_a_replica_lets_go_of_what_it_brought_nothing_to(
    after: Life, held: Fence | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "ctx", context(), raising=False)
    monkeypatch.setattr(Refusing, "after", after)
    replica = Replica(ModelSource.of(qwen()), f"{__name__}:Refusing", ExecutorOptions())
    with pytest.raises(WeightSyncError):
        asyncio.run(replica.load(None, None, ALL_PARTS))
    assert replica._locks.fence == held


class BusyElsewhere(Refusing):
    """On another node of the bundle."""

    def share_locks(self, keys: Sequence[str], fence: Fence | None) -> None:
        if fence is not None:
            raise DeviceBusyError("device 8 is in use")


def test_a_replica_that_does_not_get_all_devices_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "ctx", context(), raising=False)
    replica = Replica(ModelSource.of(qwen()), f"{__name__}:BusyElsewhere", ExecutorOptions())
    with pytest.raises(DeviceBusyError, match="device 8"):
        asyncio.run(replica.load(None, None, ALL_PARTS))
    assert replica._locks.fence is None


def test_a_rank_whose_bytes_do_not_come_back_holds_no_device() -> None:
    class Full(VirtualMover):
        def restore(self, *_: object) -> None:
            raise RlixError("no room")

    worker = object.__new__(TrainWorker)
    worker.ctx, worker._lease, locks = context(), None, Locks()
    worker._locks = locks  # type: ignore[assignment]
    worker._resident = ResidentSet("a rank", lambda: [torch.ones(4)], torch.device("cpu"), mover=Full())
    worker._resident.to_host()
    with pytest.raises(RlixError, match="no room"):
        worker.to_device()
    assert (worker._resident.life.phase, locks.fence) == (Phase.HOST, None)
