"""The device lock between real processes: exclusion, sharing, epochs, and what the kernel does when a holder dies."""

import multiprocessing
import os
import random
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.node import process
from rlix.node.device_lock import DeviceLocks, holder, lock_path, newest_epoch, remove_unheld
from rlix.protocol.errors import DeviceBusyError, RlixError, StaleEpochError
from rlix.protocol.messages import Fence
from tests.node.holders import Holder, without_its_first_thread

KEY = "GPU-0"
ONE = Fence("pool", 1, "first_job", "actor training")
TWO = Fence("pool", 2, "second_job", "rollout")
OTHER_POOL = Fence("another", 1, "their_job", "rollout")


def test_a_device_remembers_a_pools_newest_epoch_also_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert newest_epoch(KEY, "pool", tmp_path) == 0
    locks = DeviceLocks([KEY], tmp_path)
    for fence in (TWO, OTHER_POOL):
        locks.acquire(fence, 1.0)
        locks.release()
    reads = iter([b"half a rec", b"half a record"])
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, *where: next(reads, None) or read(fd, *where))
    assert newest_epoch(KEY, "pool", tmp_path) == 2


def test_another_process_is_refused_and_told_who_holds_the_device(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as first:
        assert first.acquire(ONE) is None
        before = time.time()
        with pytest.raises(DeviceBusyError) as refused:
            DeviceLocks([KEY], tmp_path).acquire(TWO, 0.05)
        for part in (KEY, f"pid {first.pid}", "first_job", "actor training", "since", "second_job waited 0.05 s"):
            assert part in str(refused.value)
        record = holder(KEY, tmp_path, "node")
        assert record is not None
        assert (record.fence, record.since <= before) == (ONE, True)
        assert [(p.pid, p.started, p.node_id) for p in record.processes] == [
            (first.pid, process.start_time(first.pid), "node")
        ]
        assert first.ask("release") is None
        DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)


def test_a_waiter_gets_the_device_when_it_is_released(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as first, Holder(tmp_path, [KEY]) as second:
        assert first.acquire(ONE) is None
        with pytest.raises(DeviceBusyError):
            DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)
        first.ask("release")
        assert second.acquire(TWO, 300.0) is None


def test_processes_of_one_epoch_share_the_device_until_the_last_lets_go(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as first, Holder(tmp_path, [KEY]) as second:
        assert first.acquire(ONE) is None
        assert second.acquire(Fence("pool", 1, "another engine")) is None
        record = holder(KEY, tmp_path)
        assert record is not None
        assert {p.pid for p in record.processes} == {first.pid, second.pid}
        first.ask("release")
        with pytest.raises(DeviceBusyError, match=f"pid {second.pid}"):
            DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)
        second.ask("release")
        DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)


def test_two_engines_of_one_process_hold_a_device_each(tmp_path: Path) -> None:
    first, second = DeviceLocks([KEY], tmp_path), DeviceLocks([KEY], tmp_path)
    first.acquire(ONE, 0.0)
    second.acquire(ONE, 0.0)
    first.release()
    record = holder(KEY, tmp_path)
    assert record is not None
    assert [p.pid for p in record.processes] == [os.getpid()]
    second.release()
    assert holder(KEY, tmp_path) is None


def test_an_older_epoch_than_the_devices_is_refused_to_whoever_asks(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as newer, Holder(tmp_path, [KEY]) as newcomer:
        assert newer.acquire(TWO) is None
        assert "StaleEpochError" in newcomer.acquire(ONE)  # while it is held: not a wait, an error
        newer.ask("release")
        assert "epoch 2 of pool 'pool'" in newcomer.acquire(ONE)  # and when it is free
        assert newcomer.acquire(TWO) is None


def test_epochs_of_pools_do_not_compare_and_outlast_another_pool(tmp_path: Path) -> None:
    locks = DeviceLocks([KEY], tmp_path)
    for fence in (Fence("pool", 7), OTHER_POOL, Fence("program:1", 0), Fence("third", 3)):
        locks.acquire(fence, 0.0)
        locks.release()
    with pytest.raises(StaleEpochError):
        locks.acquire(Fence("pool", 6), 0.0)
    locks.acquire(Fence("pool", 8), 0.0)
    with pytest.raises(DeviceBusyError):
        DeviceLocks([KEY], tmp_path).acquire(OTHER_POOL, 0.0)


def test_a_holder_goes_on_under_a_newer_epoch_without_letting_go(tmp_path: Path) -> None:
    locks = DeviceLocks([KEY], tmp_path)
    locks.acquire(Fence("program:1", 0), 0.0)
    locks.acquire(ONE, 0.0)
    locks.acquire(TWO, 0.0)
    record = holder(KEY, tmp_path)
    assert record is not None
    assert record.fence == TWO
    with pytest.raises(StaleEpochError):
        locks.acquire(ONE, 0.0)
    assert locks.fence == TWO
    with pytest.raises(DeviceBusyError):
        DeviceLocks([KEY], tmp_path).acquire(Fence("pool", 3), 0.0)


def test_it_does_not_change_the_fence_of_those_it_shares_with(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as beside:
        locks = DeviceLocks([KEY], tmp_path)
        locks.acquire(ONE, 0.0)
        beside.acquire(ONE)
        with pytest.raises(DeviceBusyError, match=f"pid {beside.pid}"):
            locks.acquire(TWO, 0.0)
        beside.ask("release")
        record = holder(KEY, tmp_path)
        assert record is not None
        assert (record.fence, locks.fence) == (ONE, ONE)
        locks.acquire(TWO, 0.0)


def test_all_devices_or_none(tmp_path: Path) -> None:
    with Holder(tmp_path, ["b"]) as other:
        other.acquire(ONE)
        locks = DeviceLocks(["c", "b", "a"], tmp_path)
        with pytest.raises(DeviceBusyError, match="device b"):
            locks.acquire(TWO, 0.0)
        assert (holder("a", tmp_path), holder("c", tmp_path)) == (None, None)
        other.ask("release")
        locks.acquire(TWO, 0.0)
        assert all(holder(key, tmp_path) for key in "abc")
        locks.release(())
        assert all(holder(key, tmp_path) for key in "abc")
        locks.release(("a", "c"))
        assert [holder(key, tmp_path) is not None for key in "abc"] == [False, True, False]
        assert (locks.keys, locks.fence) == (("b",), TWO)
        locks.release()
        assert holder("b", tmp_path) is None


def test_the_kernel_drops_the_lock_of_a_killed_holder(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as first:
        first.acquire(ONE)
        first.kill()
        assert holder(KEY, tmp_path) is None
        DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)


def test_a_forked_child_that_outlives_its_killed_parent_still_holds(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as parent:
        parent.acquire(ONE)
        child = parent.ask("fork")
        parent.kill()
        record = holder(KEY, tmp_path)
        assert record is not None
        assert ([p.pid for p in record.processes], record.fence) == ([child], ONE)
        with pytest.raises(DeviceBusyError, match=f"pid {child} "):
            DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)
        assert process.kill(record.processes, 30.0) == ()
        assert holder(KEY, tmp_path) is None


def test_a_release_is_one_for_forked_children_too(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as parent:
        parent.acquire(ONE)
        parent.ask("fork")
        parent.ask("release")
        assert holder(KEY, tmp_path) is None


def test_a_stopped_holder_is_named_as_such(tmp_path: Path) -> None:
    with Holder(tmp_path, [KEY]) as first:
        first.acquire(ONE)
        os.kill(first.pid, signal.SIGSTOP)
        os.waitpid(first.pid, os.WUNTRACED)  # until it has stopped
        with pytest.raises(DeviceBusyError, match=rf"pid {first.pid} \(stopped\) of job first_job"):
            DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)


def test_a_process_whose_first_thread_has_ended_lives_holds_and_is_stopped(tmp_path: Path) -> None:
    with without_its_first_thread(tmp_path, KEY, ONE) as pid:
        record = holder(KEY, tmp_path)
        assert record is not None
        (known,) = record.processes
        assert (known.pid, process.state(known)) == (pid, "running")
        described = process.describe(pid)
        assert described is not None and described.name.startswith(sys.executable)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert process.state(known) == "stopped"
        assert process.kill([known], 300.0) == ()
        assert process.state(known) == "dead"
        assert holder(KEY, tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b'00000000 {"pool": 1}', b"\xff" * 5000, b"[" * 4096])
def test_a_record_that_makes_no_sense_is_an_unknown_holder(tmp_path: Path, content: bytes) -> None:
    locks = DeviceLocks([KEY], tmp_path)
    path = lock_path(tmp_path, KEY)
    path.write_bytes(content)
    locks.acquire(ONE, 0.0)
    path.write_bytes(content)
    record = holder(KEY, tmp_path)
    assert record is not None
    assert [p.pid for p in record.processes] == [os.getpid()]
    with pytest.raises(DeviceBusyError, match="unknown"):
        DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)
    locks.release()
    DeviceLocks([KEY], tmp_path).acquire(TWO, 0.0)


@given(st.binary(max_size=200))
def test_no_record_makes_a_reader_fail(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    lock_path(folder, "any").write_bytes(content)
    locks = DeviceLocks(["any"], folder)
    locks.acquire(ONE, 0.0)
    lock_path(folder, "any").write_bytes(content)
    assert holder("any", folder) is not None
    locks.release()
    assert holder("any", folder) is None


def test_long_and_odd_names_fit(tmp_path: Path) -> None:
    locks = DeviceLocks([KEY], tmp_path)
    for number in range(40):
        locks.acquire(Fence(f"{number}-" + "é" * 150, 5, "job" * 500, 'ph"\n' * 300), 0.0)
        locks.release()
    with pytest.raises(StaleEpochError):
        locks.acquire(Fence("39-" + "é" * 150, 4), 0.0)
    with pytest.raises(ValueError, match="pool name of 201 characters"):
        locks.acquire(Fence("p" * 201, 1), 0.0)


def test_lock_files_are_for_every_user(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    before = os.umask(0o077)
    try:
        DeviceLocks([KEY], folder).acquire(ONE, 0.0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE(lock_path(folder, KEY).stat().st_mode) == 0o666
    (tmp_path / "file").touch()
    with pytest.raises((RlixError, NotADirectoryError)):
        DeviceLocks([KEY], tmp_path / "file").acquire(ONE, 0.0)


def test_files_of_devices_that_are_gone_are_removed_but_for_held_ones(tmp_path: Path) -> None:
    held, free = DeviceLocks(["virtual-a-0"], tmp_path), DeviceLocks(["virtual-a-1", "GPU-1"], tmp_path)
    held.acquire(ONE, 0.0)
    free.acquire(ONE, 0.0)
    free.release()
    assert remove_unheld("virtual-a-", tmp_path, older_than_s=3600.0) == 0
    assert remove_unheld("virtual-a-", tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["GPU-1.lock", "virtual-a-0.lock"]


def test_whoever_opened_a_file_before_it_was_removed_locks_the_new_one(tmp_path: Path) -> None:
    late = DeviceLocks([KEY], tmp_path)
    first = DeviceLocks([KEY], tmp_path)
    first.acquire(ONE, 0.0)
    with pytest.raises(DeviceBusyError):
        late.acquire(TWO, 0.0)
    (file,) = late._files
    assert not file.take(TWO)  # it has the file open now
    first.release()
    lock_path(tmp_path, KEY).unlink()
    first.acquire(ONE, 0.0)
    with pytest.raises(DeviceBusyError):
        late.acquire(TWO, 0.05)


def test_nobody_ever_has_a_device_beside_another_fence(tmp_path: Path) -> None:
    """Eight processes take random devices under random fences; who holds some leaves a witness there."""
    devices = [f"d{i}" for i in range(3)]
    folder = tmp_path / "locks"
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        work = [(folder, tmp_path, devices, seed) for seed in range(8)]
        rounds = pool.starmap_async(_take_random_devices, work).get(timeout=300)
    assert sum(granted for granted, _ in rounds) > 100
    assert [problem for _, problems in rounds for problem in problems] == []
    assert [holder(device, folder) for device in devices] == [None] * 3


def _take_random_devices(folder: Path, witnesses: Path, devices: list[str], seed: int) -> tuple[int, list[str]]:
    source = random.Random(seed)
    granted, problems = 0, []
    for _ in range(60):
        chosen = source.sample(devices, source.randint(1, len(devices)))
        fence = Fence(f"pool{source.randrange(3)}", 1)
        locks = DeviceLocks(chosen, folder)
        try:
            locks.acquire(fence, 0.2)
        except DeviceBusyError:
            continue
        granted += 1
        mine = [witnesses / f"{device}.{fence.pool}.{os.getpid()}" for device in chosen]
        for path in mine:
            path.touch()
        for device in chosen:
            there = {path.name.split(".")[1] for path in witnesses.glob(f"{device}.*")}
            if there != {fence.pool}:
                problems.append(f"{device}: {sorted(there)}")
        for path in mine:
            path.unlink()
        locks.release()
    return granted, problems
