"""Which jobs may start by the memory of their hosts: the decision alone, and with a control plane that measures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlix.control.admission import LEAST, RESERVE, Load, admit, overload
from rlix.control.settings import Settings
from rlix.control.starts import Starts
from rlix.node.memory import HostMemory, host_memory
from rlix.node.process import this_process
from rlix.protocol.events import HoldersNamed
from rlix.protocol.messages import Process, StartNeed
from tests.control.world import World, process

GB = 1_000_000_000
HOST = {"node": HostMemory(100 * GB, 50 * GB)}  # of which 10 stay free


def load(job: str, expected: int, used: int = 0) -> Load:
    return Load(job, {"node": expected * GB}, {"node": used * GB} if used else {})


def test_jobs_start_in_their_order_while_there_is_room() -> None:
    waiting = [load("a", 20), load("b", 15), load("c", 10), load("d", 1)]
    found = admit(HOST, [], waiting)
    assert found.admitted == ("a", "b")  # d would fit, but does not overtake c
    assert found.why == "needs about 10.0 GB of memory, 5.0 GB are free"


def test_what_started_jobs_may_still_come_to_use_is_spoken_for() -> None:
    assert admit(HOST, [load("a", 30, used=5)], [load("b", 15)]).admitted == ("b",)
    assert admit(HOST, [load("a", 30, used=4)], [load("b", 15)]).admitted == ()
    above = load("a", 1, used=40)  # what it uses beyond that is not there any more anyway
    assert admit(HOST, [above], [load("b", 40)]).admitted == ("b",)


def test_alone_a_job_may_start_whatever_is_expected_of_it() -> None:
    assert admit(HOST, [], [load("a", 1000), load("b", 1)]).admitted == ("a",)
    assert "on node other" in admit({**HOST, "other": HostMemory(GB, 0)}, [load("x", 0)], [Load("a", {"other": 1})]).why
    silent = Load("a", {"a host that does not answer": 1000 * GB})
    assert admit(HOST, [load("x", 0)], [silent]).admitted == ("a",)


@given(
    available=st.integers(-10, 100),
    started=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4),
    waiting=st.lists(st.integers(0, 60), max_size=6),
)
def test_nobody_overtakes_nothing_is_promised_twice_and_somebody_always_runs(
    available: int, started: list[tuple[int, int]], waiting: list[int]
) -> None:
    hosts = {"node": HostMemory(100 * GB, available * GB)}
    running = [load(f"r{i}", expected, used) for i, (expected, used) in enumerate(started)]
    queue = [load(f"w{i}", expected) for i, expected in enumerate(waiting)]
    found = admit(hosts, running, queue)
    count = len(found.admitted)
    assert list(found.admitted) == [each.job for each in queue[:count]]
    assert bool(found.why) == (count < len(queue))
    assert count or running or not queue
    promised = sum(max(0, expected - used) for expected, used in started) + sum(waiting[:count])
    assert (
        promised <= available - 100 * RESERVE
        or count == 0
        or (count == 1 and not running)
        or (not running and sum(waiting[1:count]) == 0)
    )
    more = admit({"node": HostMemory(100 * GB, (available + 10) * GB)}, running, queue)
    assert len(more.admitted) >= count


def test_the_job_furthest_above_what_was_expected_ends_or_else_the_last() -> None:
    full = {"node": HostMemory(100 * GB, 4 * GB)}
    assert full["node"].available < LEAST * full["node"].total
    modest, greedy, small = load("modest", 40, used=40), load("greedy", 10, used=30), load("small", 1, used=2)
    assert overload(HOST, [modest, greedy, small]) is None
    found = overload(full, [modest, greedy, small])
    assert found == (
        "greedy",
        "its host had 4.0 GB of 100.0 GB of memory left, and it used 30.0 GB (expected: 10.0 GB)",
    )
    assert (overload(full, [modest, load("late", 40, used=1)]) or [""])[0] == "late"
    assert overload(full, [load("elsewhere", 1)]) is None


class Memory:
    """What the nodes would say."""

    def __init__(self, available: int = 50) -> None:
        self.available = available
        self.used: dict[Process, int] = {}

    def __call__(
        self, nodes: Sequence[str], processes: Sequence[Process], done: Callable[[Mapping[str, HostMemory]], None]
    ) -> None:
        used = {process: self.used.get(process, 0) * GB for process in processes}
        done({node: HostMemory(100 * GB, self.available * GB, used) for node in nodes})


NEED = StartNeed("sorting", {"": 2 * GB, "actor_train": 4 * GB, "actor_infer": 1 * GB})  # 2 + 2 x 4 + 4 x 1 = 14


def starts(world: World, memory: Memory) -> Starts:
    made = Starts(world.core, memory)
    made.watch()
    return made


def run_as(world: World, job: str, pid: int) -> Process:
    """The job's program runs."""
    world.core.record(HoldersNamed(job, "", ((0, process(pid)),)))
    return process(pid)


def test_jobs_wait_for_memory_in_their_order_and_say_so() -> None:
    world = World(jobs=4)
    queue = starts(world, Memory(40))
    assert [queue.may_start(f"ft_{n}", NEED) for n in (1, 2)] == ["", ""]
    assert queue.may_start("ft_3", NEED) == "needs about 14.0 GB of memory, 2.0 GB are free"
    assert queue.may_start("ft_4", NEED) == "1 job before it waits for memory"
    assert queue.may_start("ft_1", NEED) == ""  # asked again
    world.core.end("ft_1", "over")
    world.run(2.0)
    assert "needs about 14.0 GB" in queue.may_start("ft_4", NEED)  # what is free is the third one's
    assert queue.may_start("ft_3", NEED) == ""
    world.core.end("ft_2", "over")
    world.run(20.0)
    assert queue.may_start("ft_4", NEED) == ""


@pytest.mark.parametrize(("takes_s", "looks"), [(0.0, 20), (0.5, 8), (5.0, 4)])
def test_looks_that_take_long_are_few(takes_s: float, looks: int) -> None:
    """Many large processes: the kernel counts their pages each time."""
    world, asked = World(jobs=1), list[float]()

    class Slow(Memory):
        def __call__(
            self, nodes: Sequence[str], processes: Sequence[Process], done: Callable[[Mapping[str, HostMemory]], None]
        ) -> None:
            asked.append(world.clock.time())
            world.clock.call_later(takes_s, partial(super().__call__, nodes, processes, done))

    starts(world, Slow())
    world.run(40.0)
    assert len(asked) == pytest.approx(looks, abs=1)


def test_who_stops_asking_loses_its_place() -> None:
    world = World(jobs=3)
    queue = starts(world, Memory(20))
    assert queue.may_start("ft_1", NEED) == ""
    assert "needs about" in queue.may_start("ft_2", NEED)
    assert "1 job before" in queue.may_start("ft_3", NEED)
    world.run(16.0)  # the second one's coordinator is stopped
    assert "needs about" in queue.may_start("ft_3", NEED)


def test_what_a_job_that_has_trained_used_counts_for_others_of_its_kind() -> None:
    world, memory = World(jobs=3), Memory(30)
    queue = starts(world, memory)
    assert queue.may_start("ft_1", NEED) == ""
    memory.used[run_as(world, "ft_1", 7)] = 1
    workers = [process(8), process(9)]
    world.core.record(HoldersNamed("ft_1", "actor_train", tuple(enumerate(workers))))
    memory.used |= dict.fromkeys(workers, 1)
    world.run(2.0)
    assert "needs about 14.0 GB" in queue.may_start("ft_2", NEED)  # it has not trained: nothing is known yet
    world.release(world.gang("ft_1", holder=process(7)))
    world.run(3.0)
    assert queue.may_start("ft_2", NEED) == ""  # 1 + 2 x 1 + 4 x 1: its rollout was not seen, which stays as stated
    assert "needs about 14.0 GB" in queue.may_start("ft_3", replace(NEED, kind="something else"))


def test_a_program_that_takes_all_memory_ends_by_name_and_nobody_else() -> None:
    world, memory = World(jobs=2), Memory(30)
    queue = starts(world, memory)
    memory.used[run_as(world, "ft_1", 7)] = 5  # attached itself
    world.run(2.0)
    assert queue.may_start("ft_2", NEED) == ""
    memory.used[run_as(world, "ft_2", 8)] = 14
    world.run(2.0)
    memory.used[process(7)], memory.available = 60, 1
    world.run(2.0)
    memory.available = 61
    world.run(4.0)
    assert world.machine.killed == [process(7)]
    assert "its host had 1.0 GB of 100.0 GB of memory left, and it used 60.0 GB" in world.machine.told[7]
    assert "ft_2" in world.core.known.jobs


def test_jobs_together_stay_within_what_the_user_allows() -> None:
    world = World(jobs=2, settings=Settings(Path("unused"), host_memory=20 * GB))
    queue = starts(world, Memory())
    assert queue.may_start("ft_1", NEED) == ""
    assert queue.may_start("ft_2", NEED) == "needs about 14.0 GB of memory, 4.0 GB are free"


@pytest.mark.parametrize(
    ("line", "files", "limits"),
    [
        ("0::/a/b", {"a/memory.max": "7000000\n", "a/memory.current": "2000000", "a/b/memory.max": "max"}, True),
        ("4:memory:/x", {"memory/memory.limit_in_bytes": "7000000", "memory/memory.usage_in_bytes": "2000000"}, True),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "1"}, False),
        ("3:cpuset:/a", {}, False),
    ],
)
def test_a_container_has_the_memory_of_its_tightest_group(
    line: str, files: dict[str, str], limits: bool, tmp_path: Path
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"{line}\n")
    (proc / "meminfo").write_text("MemTotal:       9000 kB\nMemFree: 1 kB\nMemAvailable:   8000 kB\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
        (groups / name).with_name("memory.stat").write_text("anon 5\ninactive_file 400000\nactive_file 100000\n")
    found = host_memory([], proc, groups)
    assert (found.total, found.available) == ((7_000_000, 5_500_000) if limits else (9000 * 1024, 8000 * 1024))


def test_what_a_process_uses_is_measured_here() -> None:
    me = this_process()
    found = host_memory([me, replace(me, started=me.started - 1)])
    assert 10_000_000 < found.used[me] < found.total and 0 < found.available < found.total
    assert list(found.used) == [me]  # the other one has ended: its number is reused
