"""How long the scheduler service's loop is kept busy at once, and how fast jobs register, in a large pool.

    python -m benchmarks.control_turns [--devices 10000] [--jobs 500] [--seconds 70] [--profile]

The service that `rlix:scheduler` runs, with a journal on disk and without Ray and nodes: jobs are tasks of its loop.
They register one after another by size: a gang of 16 that may move, and a rollout on the whole pool in bundles of 1, 2,
4 or 8. Then each beats and reports its demand once a second, polls, gives back what it is asked for, and asks for its
gang in turn; somebody asks for the status once a second. A turn is one callback of the loop. Its time is the
processor's, which on an idle machine is what elapses.
"""

import argparse
import asyncio
import cProfile
import logging
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rlix.control.core import Core
from rlix.control.gang_queue import Asked
from rlix.control.garbage import collect_between_turns
from rlix.control.journal import Journal
from rlix.control.scheduler_service import Scheduler
from rlix.control.settings import Settings
from rlix.protocol.events import DevicesDiscovered
from rlix.protocol.messages import Demand, Device, DeviceKind, Process
from rlix.protocol.types import Phase
from rlix.sim.pool import FreeNodes

POOL = "benchmark"
GANG = 16


class Nodes(FreeNodes):
    """Every device is free as soon as its lease is given back, and every process runs."""

    def states(self, processes: Sequence[Process], done: Callable[[Mapping[Process, str]], None]) -> None:
        done(dict.fromkeys(processes, "running"))


class Turns:
    """The durations of the loop's callbacks, by what the benchmark does meanwhile."""

    def __init__(self) -> None:
        self.now = ""
        self.took: dict[str, list[tuple[float, str]]] = {}
        run = asyncio.Handle._run

        def timed(handle: Any) -> None:
            start = time.thread_time()
            run(handle)
            self.took.setdefault(self.now, []).append((time.thread_time() - start, _name(handle._callback)))

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]

    def say(self) -> None:
        for what, took in self.took.items():
            if what:
                seconds = sorted(s for s, _ in took)
                worst = ", ".join(f"{s * 1e3:.0f} ms {name}" for s, name in sorted(took, reverse=True)[:4])
                p99 = seconds[int(0.999 * (len(seconds) - 1))]
                print(f"{what}: longest turn {seconds[-1] * 1e3:.0f} ms (99.9 %: {p99 * 1e3:.1f} ms; {worst})")


def _name(callback: Any) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", "task"))
    return str(getattr(callback, "__qualname__", type(callback).__name__))


async def registered(service: Scheduler, number: int, rng: random.Random) -> str:
    job = await service.allocate_pipeline_id("ft")
    size = rng.choice((1, 2, 4, 8))
    sizes = {"actor_infer": size, "actor_train": 1}
    await service.register_pipeline(
        job, f"pipeline_{job}_NS", sizes, {"actor_infer": None, "actor_train": GANG}, name=f"job{number}"
    )
    await service.admit_pipeline(job)
    return job


async def live(service: Scheduler, job: str, number: int, rng: random.Random) -> None:
    """Rolls out, trains, and so on."""
    process = Process("node0", 1000 + number, 1, job)
    held: set[int] = set()

    async def beats() -> None:
        while True:
            await service.beat(job, process, tuple(held))
            await asyncio.sleep(1.0)

    async def polls() -> None:
        while True:
            answer = await service.poll_rollout(job, "actor_infer", process, tuple(held), ())
            held.update(lease.epoch for lease in answer.granted)
            held.difference_update(answer.lost)
            if answer.taken:
                epochs = [lease.epoch for lease in answer.taken]
                held.difference_update(epochs)
                await service.release(job, epochs)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(beats()), asyncio.ensure_future(polls())]
    try:
        await asyncio.sleep(rng.random())
        while True:
            for left in range(rng.randint(4, 12), -1, -1):
                await service.report_demand(job, "actor_infer", Demand(left * rng.randint(8, 200)))
                await asyncio.sleep(1.0)
            asked = Asked(key=f"{job}-{rng.random()}", holder=process)
            lease = await service.poll_gang(job, "actor_train", Phase.ACTOR_TRAINING, asked)
            while lease is None:
                lease = await service.poll_gang(job, "actor_train", Phase.ACTOR_TRAINING, asked)
            held.add(lease.epoch)
            await asyncio.sleep(2.0 * rng.random())
            held.discard(lease.epoch)
            await service.release(job, (lease.epoch,))
    finally:
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watched(service: Scheduler, took: list[float]) -> None:
    while True:
        start = time.thread_time()
        await service.status()
        took.append(time.thread_time() - start)
        await asyncio.sleep(1.0)


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    turns, rng = Turns(), random.Random(0)
    service = Scheduler(Settings(home=folder), POOL, logging.ERROR)
    journal = Journal(folder / "journal.db")
    core = Core(Settings(home=folder), journal, clock=asyncio.get_running_loop(), nodes=Nodes(), pool=POOL)
    service._started = core
    core.record(
        DevicesDiscovered(
            tuple(
                Device(i, f"node{i // 8}", "10.0.0.1", i % 8, DeviceKind.CUDA, f"GPU-{i}")
                for i in range(arguments.devices)
            )
        )
    )
    core.start()
    collect_between_turns(asyncio.get_running_loop())
    profile = cProfile.Profile() if arguments.profile else None
    turns.now = "registration"
    start = time.thread_time()
    if profile:
        profile.enable()
    jobs = []
    for number in range(arguments.jobs):
        jobs.append(await registered(service, number, rng))
        await asyncio.sleep(0)
    took_s = time.thread_time() - start
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        profile = cProfile.Profile()
        profile.enable()
    print(f"{arguments.jobs} jobs register in {took_s:.2f} s: {arguments.jobs / took_s:.0f} a second")
    turns.now = "running"
    statuses: list[float] = []
    tasks = [
        *(asyncio.ensure_future(live(service, job, n, random.Random(n))) for n, job in enumerate(jobs)),
        asyncio.ensure_future(watched(service, statuses)),
    ]
    busy = time.process_time()
    await asyncio.sleep(arguments.seconds)
    busy = time.process_time() - busy
    turns.now = ""
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    plans = core.planning
    print(f"{plans.turns} plans, {plans.turns_s / max(1, plans.turns) * 1e3:.1f} ms each; {busy:.1f} s of a core")
    print(f"status: {statistics.median(statuses) * 1e3:.0f} ms p50 to answer, {max(statuses) * 1e3:.0f} ms at most")
    turns.say()
    core.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments, Path(folder)))


if __name__ == "__main__":
    main()
