"""What a machine tells the control plane."""

import os
from pathlib import Path

from rlix.node.node import Node
from rlix.node.process import this_process
from rlix.protocol.messages import Device, DeviceKind, Fence
from tests.node.holders import Holder


def test_it_says_who_has_which_device_and_ends_them(tmp_path: Path) -> None:
    devices = [Device(i, "here", "127.0.0.1", i, DeviceKind.CPU, f"virtual-here-{i}") for i in range(8)]
    node = Node("here", tmp_path)
    assert node.holders(devices) == {}
    with Holder(tmp_path, [devices[2].key, devices[5].key]) as job:
        job.acquire(Fence("pool", 4, "a job", "rollout"))
        found = node.holders(devices)
        assert set(found) == {2, 5}
        assert found[5].fence == Fence("pool", 4, "a job", "rollout")
        (held,) = found[5].processes
        assert (held.pid, held.node_id) == (job.pid, "here")
        me = this_process("here")
        assert node.states([held, me]) == {held: "running", me: "running"}
        assert node.kill([held], 30.0) == ()
        assert node.holders(devices) == {}
        assert node.states([held]) == {held: "dead"}
        assert me.pid == os.getpid()
