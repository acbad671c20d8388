"""The store by which the ranks of a group on several hosts find each other."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlix.protocol.errors import RlixError
from rlix.workers import store as store_module
from rlix.workers.store import GroupStore, StoreServer, check_reachable

SECRET = "5ec7e7"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", SECRET)
    yield server
    server.close()


def client(server: StoreServer, secret: str = SECRET) -> GroupStore:
    return GroupStore(("127.0.0.1", server.port), secret, 10.0, 10.0)


def test_what_one_rank_sets_another_one_gets_also_when_it_waits_for_it(server: StoreServer) -> None:
    one, other = client(server), client(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.get, "key")
        one.set("key", bytes(range(256)))
        assert waiting.result() == bytes(range(256))
    assert [one.add("count", 2), other.add("count", 3)] == [2, 5]
    assert (one.check(["key", "count"]), one.check(["key", "none"])) == (True, False)
    with pytest.raises(dist.DistStoreError, match=r"nobody has set key, none within 0\.01 s"):
        one.wait(["key", "none"], timedelta(seconds=0.01))


def test_a_thread_that_waits_holds_up_no_other_one(server: StoreServer) -> None:
    store = client(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late")
        assert not store.check(["late"])
        store.set("late", b"now")
        assert waiting.result() == b"now"


def test_a_stranger_learns_nothing_and_changes_nothing(server: StoreServer) -> None:
    store, stranger = client(server), client(server, "guessed")
    store.set("key", b"1")
    with pytest.raises(dist.DistStoreError, match="is gone"):
        stranger.get("key")
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(b'["set", "key", "2"]\n')
        assert plain.recv(100) == b""
    assert store.get("key") == b"1"


def test_it_is_at_one_address(server: StoreServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port))


def test_a_store_that_is_gone_is_an_error_and_for_the_watchful_only_no(server: StoreServer) -> None:
    store = client(server)
    store.set("key", b"1")
    server.close()
    del store._own.stream, store._own.connection
    assert not store.check(["key"])
    with pytest.raises(dist.DistStoreError, match=r"127\.0\.0\.1 does not answer"):
        store.get("key")
    with pytest.raises(RlixError, match=r"127\.0\.0\.1 cannot be reached within 0\.1 s: Connection refused"):
        GroupStore(("127.0.0.1", server.port), SECRET, 10.0, 0.1)


def test_a_process_group_is_made_and_works_with_it(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = client(server)  # torch does not keep its methods
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        ones = torch.ones(3)
        dist.all_reduce(ones, group=dist.new_group([0]))
        assert ones.tolist() == [1.0, 1.0, 1.0]
    finally:
        dist.destroy_process_group()


HOSTS = ("127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3")


def check_all(server: StoreServer) -> list[str]:
    """What each of four members, on three hosts, is told."""

    def check(member: int) -> str:
        where = HOSTS[member]
        try:
            check_reachable(client(server), member, len(HOSTS), f"host{where[-1]}", where, 10.0)
        except RlixError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(HOSTS)) as pool:
        return list(pool.map(check, range(len(HOSTS))))


def test_hosts_that_reach_each_other_go_on(server: StoreServer) -> None:
    assert check_all(server) == [""] * 4
    assert threading.active_count() < 100


def test_who_does_not_come_is_named_within_the_time_to_meet_not_that_of_a_collective(server: StoreServer) -> None:
    with pytest.raises(RlixError, match=r"of the group's members 1, 2 did not come within 0\.1 s"):
        check_reachable(client(server), 0, 3, "host1", HOSTS[0], 0.1)


def test_all_are_told_which_host_cannot_reach_which(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of hosts is tried, not only each host's way to the first one."""
    reach = store_module.reach

    def cut(address: tuple[str, int], timeout_s: float) -> socket.socket:
        if address[0] == "127.0.0.3":
            raise RlixError("127.0.0.3 cannot be reached within 60 s: no answer")
        return reach(address, timeout_s)

    monkeypatch.setattr(store_module, "reach", cut)
    said = check_all(server)
    assert len(set(said)) == 1
    for host in (1, 2):
        assert f"host host{host} (127.0.0.{host}) waits for host host3: 127.0.0.3 cannot be reached" in said[0]
    assert "host host3 (" not in said[0]
