"""What a worker's process is told of its devices, and under which fence it uses them."""

import os
from typing import Any

import pytest

from rlix.control.resource_manager import devices_of
from rlix.node.devices import Gpu, visible
from rlix.protocol.messages import Device, DeviceKind, Fence
from rlix.workers.worker import WorkerContext, prepare_process, program_fence


def context(*devices: Device) -> WorkerContext:
    return WorkerContext(
        group="train",
        group_id="1",
        rank=0,
        world_size=1,
        devices=devices,
        cpu_threads=1,
        rendezvous=None,
        owner=program_fence(),
    )


def test_workers_use_the_gpus_that_the_node_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray was started with CUDA_VISIBLE_DEVICES=4,5, its two GPUs are number 4 and 5 of the machine."""
    keys = visible(tuple(Gpu(f"GPU-{number}") for number in range(8)), "4,5")
    node: dict[str, Any] = {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"GPU": 2.0}}
    first, second = devices_of([node], {"a": keys})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    prepare_process(context(second))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    prepare_process(context(first, second))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-4,GPU-5"
    unknown = devices_of([node])  # nobody asked the node
    prepare_process(context(unknown[1]))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert context(first, second).device_locks().keys == ("GPU-4", "GPU-5")


def test_whose_a_workers_bytes_are() -> None:
    worker = context(Device(0, "node", "10.0.0.1", 0, DeviceKind.CPU))
    lease = Fence("a pool", 7, "a job", "rollout")
    assert worker.fence(lease) == lease
    assert (worker.fence(7).pool, worker.fence(7).epoch, worker.fence(7).phase) == ("pool", 7, "train")
    assert worker.fence(None) == program_fence()
    assert worker.fence(None).epoch == 0
    assert f"pid {os.getpid()}" in worker.fence(None).job
    assert worker.device_locks().keys == ("cpu-node-0",)
