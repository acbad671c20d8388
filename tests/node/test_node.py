"""What a machine tells the control plane."""

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlix.node.node import Node
from rlix.node.process import describe, state, this_process
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


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any of it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        yield child
        child.kill()


def test_who_is_named_and_does_not_have_the_lock_is_not_ended(
    tmp_path: Path, innocent: "subprocess.Popen[bytes]"
) -> None:
    device = Device(0, "here", "127.0.0.1", 0, DeviceKind.CPU, "virtual-here-0")
    node, named = Node("here", tmp_path), describe(innocent.pid, "here")
    assert named is not None
    with Holder(tmp_path, [device.key]) as job:
        job.acquire(Fence("pool", 4, "a job", "rollout"))
        (held,) = node.holders([device])[0].processes
        assert node.kill([named, held], 30.0, "", [device]) == (named,)
        assert (state(named), state(held)) == ("running", "dead")


def test_a_lock_in_the_name_of_another_process_is_its_own_makers(
    tmp_path: Path, innocent: "subprocess.Popen[bytes]"
) -> None:
    """Anybody can lock the byte that stands for anybody."""
    device = Device(0, "here", "127.0.0.1", 0, DeviceKind.CPU, "virtual-here-0")
    named = describe(innocent.pid, "here")
    assert named is not None
    file = os.open(tmp_path / f"{device.key}.lock", os.O_RDWR | os.O_CREAT)
    try:
        byte = (1 << 62) + (named.started << 22) + named.pid
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))
        found = Node("here", tmp_path).holders([device])[0].processes
        assert [process.pid for process in found] == [os.getpid()]
    finally:
        os.close(file)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process of another user")
def test_another_users_process_is_not_ended_because_somebody_named_it() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, start_new_session=True, user=65534) as child:
        named = describe(child.pid, "here")
        assert named is not None
        assert Node("here").kill([named], 5.0) == (named,)
        assert state(named) == "running"
        child.kill()
