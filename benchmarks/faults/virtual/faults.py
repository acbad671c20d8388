"""What breaks in a virtual pool. Each kind says whom it may harm, breaks something, and mends it after a while."""

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from benchmarks.faults.virtual.jobs import Job
from benchmarks.faults.virtual.life import PLANS, Life, Verdict
from benchmarks.faults.virtual.machines import Machine, Proc
from benchmarks.faults.virtual.plane import POOL
from rlix.control.gang_queue import Asked
from rlix.protocol.errors import DeviceBusyError, RlixError
from rlix.protocol.messages import Demand, Fence, Process
from rlix.protocol.types import Phase

Kind = Callable[[Life, random.Random], Awaitable[None]]
FOREIGN = "another pool"


def _job(life: Life, rng: random.Random) -> Job | None:
    alive = [job for job in life.jobs if not job.over]
    return rng.choice(alive) if alive else None


def _lockers(life: Life) -> list[Proc]:
    return [p for m in life.machines for lock in m.locks.values() for p in lock.holders if p.job]


def _host(life: Life, rng: random.Random) -> Machine:
    """Any but the control plane's own."""
    return rng.choice(life.machines[1:])


async def _for(life: Life, seconds: float) -> None:
    life.outage_s += seconds
    await asyncio.sleep(seconds)


# ---- programs and their workers --------------------------------------------------------------------------------------


async def client_killed(life: Life, rng: random.Random) -> None:
    if job := _job(life, rng):
        life.may_kill.add(job.name)
        job.home.end(job.program, "killed")


async def worker_killed(life: Life, rng: random.Random) -> None:
    if lockers := _lockers(life):
        proc = rng.choice(lockers)
        if any(proc is job.program for job in life.jobs):
            life.may_kill.add(proc.job)
        proc.host.end(proc)


async def client_slow(life: Life, rng: random.Random) -> None:
    """Within all bounds: it must not cost it anything."""
    if job := _job(life, rng):
        job.slow_s = rng.uniform(0.5, 2.5)
        await asyncio.sleep(rng.uniform(5.0, 30.0))
        job.slow_s = 0.0


async def client_mute(life: Life, rng: random.Random) -> None:
    """It says nothing but what it has to."""
    if job := _job(life, rng):
        seconds = rng.choice([10.0, 60.0])
        if seconds > 15.0:
            life.may_kill.add(job.name)
        job.mute = True
        await asyncio.sleep(seconds)
        job.mute = False


async def client_hangs(life: Life, rng: random.Random) -> None:
    if job := _job(life, rng):
        life.may_kill.add(job.name)
        job.hangs = True
        await _for(life, rng.uniform(2.0, 60.0))
        job.hangs = False


async def program_stopped(life: Life, rng: random.Random) -> None:
    if job := _job(life, rng):
        await _stopped(life, rng, job.program)


async def worker_stopped(life: Life, rng: random.Random) -> None:
    if lockers := _lockers(life):
        await _stopped(life, rng, rng.choice(lockers))


async def _stopped(life: Life, rng: random.Random, proc: Proc) -> None:
    seconds = rng.choice([1.0, 20.0])
    life.may_kill.add(proc.job)  # also a second is too long for who was asked to give a bundle back some time ago
    if proc.alive:
        proc.state = "stopped"
        await _for(life, seconds)
        if proc.state == "stopped":
            proc.state = "running"


async def unkillable(life: Life, rng: random.Random) -> None:
    """A process that holds a device cannot be ended, and has to."""
    if lockers := [p for p in _lockers(life) if p.alive]:
        proc = rng.choice(lockers)
        life.may_kill.add(proc.job)
        proc.undying = True
        job = next(job for job in life.jobs if job.name == proc.job)
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        if not job.over and proc is not job.program:
            job.home.end(job.program, "killed")
        await _for(life, rng.uniform(5.0, 60.0))
        proc.undying = False
        if proc.condemned or job.over:
            proc.host.end(proc)


# ---- what is said that is not so -------------------------------------------------------------------------------------


async def liar(life: Life, rng: random.Random) -> None:
    """A job says what it likes, for a while; only it may be worse off."""
    alive = [job for job in life.jobs if not job.over and job.id]
    if len(alive) < 2:
        return
    job = rng.choice(alive)
    other = rng.choice([each for each in alive if each is not job])
    life.may_kill.add(job.name)
    for _ in range(rng.randint(1, 5)):
        method, args = rng.choice(_lies(life, rng, job, other))
        try:
            await asyncio.wait_for(life.plane.ask(job.home, method, *args), 30.0)
        except (RlixError, TimeoutError):
            pass
        except Exception as error:  # noqa: BLE001 - whatever is raised besides is a finding
            life.wrong(f"{method}{args} raised {error!r}")
        await asyncio.sleep(rng.uniform(0.0, 3.0))


def _lies(life: Life, rng: random.Random, job: Job, other: Job) -> list[tuple[str, tuple[Any, ...]]]:
    core = life.plane.core
    theirs = [s.lease.epoch for s in core.state.leases_of(other.id)] if core is not None else []
    mine = list(job.held) or [1]
    lockers = [p.id for p in _lockers(life) if p.job != job.name] or [other.program.id]
    victim = rng.choice([other.program.id, *lockers])
    cluster = "roll" if job.plan.roll is not None else "train"
    gang = Asked(f"lie-{rng.random()}", victim, tuple(theirs), 5.0)
    demands = [Demand(10**18), Demand(1, tokens=1 << 60), Demand(5, load_s=math.nan), Demand(1, load_s=5e-324)]
    return [
        ("name_holders", (job.id, "", {0: victim})),
        ("name_holders", (job.id, "", {0: job.program.id, 1: victim})),
        ("name_holders", (job.id, cluster, {0: victim, 1: victim, 7: job.program.id})),
        ("name_holders", (job.id, cluster, {0: Process("no such host", 1, 1)})),
        ("name_holders", (job.id, "\ud800", {})),
        ("beat", (job.id, victim, tuple(theirs))),
        ("beat", (job.id, job.program.id, ())),
        ("beat", (job.id, job.program.id, tuple(range(1000)))),
        ("release", (job.id, tuple(theirs))),
        ("release", (job.id, tuple(mine) * 2)),
        ("give_back", (job.id, mine[0], (0, 1, 99))),
        ("give_back", (job.id, mine[0], tuple(sorted(job.devices))[:1])),
        ("report_demand", (job.id, cluster, rng.choice(demands))),
        ("report_demand", (job.id, cluster, Demand(1_000_000))),
        ("report_demand", (job.id, "train", Demand(1))),
        ("poll_rollout", (job.id, cluster, victim, tuple(theirs), tuple(theirs), 0.0)),
        ("poll_rollout", (job.id, cluster, None, (), tuple(range(50)), 1e12)),
        ("poll_gang", (job.id, "train", Phase.ACTOR_TRAINING, gang, 1.0)),
        ("poll_gang", (job.id, cluster, 99, Asked(devices=(10**9,)), 1.0)),
        ("withdraw_gang", (job.id, "")),
        ("register_pipeline", (job.id, "ns", {"x": 1}, {"x": [10**400]}, None, None, "\ud800")),
        ("admit_pipeline", (job.id,)),
        ("unregister_pipeline", (job.id, "I am told to", victim)),
    ]


async def keeps_its_lock(life: Life, rng: random.Random) -> None:
    """A job gives back what its worker still uses."""
    if lockers := _lockers(life):
        proc = rng.choice(lockers)
        job = next(job for job in life.jobs if job.name == proc.job)
        epochs = [lock.fence.epoch for lock in proc.host.locks.values() if proc in lock.holders]
        life.may_kill.add(job.name)
        lease = job.held.get(epochs[0]) if epochs else None
        said: tuple[Any, ...] = ("release", job.id, epochs)
        if lease is not None and len(lease.devices) > 1 and rng.random() < 0.7:
            said = ("give_back", job.id, lease.epoch, lease.devices[:1])
        try:
            await asyncio.wait_for(life.plane.ask(job.home, *said), 30.0)
        except (RlixError, TimeoutError):
            return


async def stranger(life: Life, rng: random.Random) -> None:
    """Another user's program, of another pool, takes a device that is free; or one of ours, that nobody granted it."""
    foreign = rng.random() < 0.7
    free = [(m, key) for m in life.machines if m.powered for key in m.names() if key not in m.locks]
    if not free:
        return
    machine, key = rng.choice(free)
    life.excused.add(key)
    proc = machine.start("", "a stranger", foreign=foreign)
    try:
        machine.lock(key, Fence(FOREIGN if foreign else POOL, 1, "a stranger"), proc)
    except (DeviceBusyError, RlixError):
        machine.end(proc)
        return
    await _for(life, rng.uniform(1.0, 40.0))
    machine.end(proc)


# ---- hosts -----------------------------------------------------------------------------------------------------------


async def host_lost(life: Life, rng: random.Random) -> None:
    await _power_cycle(life, rng, _host(life, rng))


async def host_misconfigured(life: Life, rng: random.Random) -> None:
    """It comes back as it should not be, and is mended later."""
    machine = _host(life, rng)
    machine.fit = False
    await _power_cycle(life, rng, machine)
    await _for(life, rng.uniform(1.0, 20.0))
    machine.fit = True
    await _power_cycle(life, rng, machine)


async def _power_cycle(life: Life, rng: random.Random, machine: Machine) -> None:
    life.may_kill |= life.jobs_on(machine)
    machine.off()
    await _for(life, rng.choice([1.0, 10.0, 30.0]))
    if not machine.powered:
        machine.powered = machine.reached = True
        machine.join()


async def partition(life: Life, rng: random.Random) -> None:
    """Cut off, but running: for a moment, or until Ray gives the host up; then it comes back as another."""
    machine = _host(life, rng)
    if not machine.reached:
        return
    seconds = rng.choice([1.5, 12.0, 40.0])
    if seconds > 2.0:
        life.may_kill |= life.jobs_on(machine)
    machine.reached = False
    await _for(life, seconds)
    if machine.powered:
        machine.reached = True
        if not machine.counted:
            life.excused.update(machine.names())
            for proc in list(machine.procs.values()):
                if rng.random() < 0.7 and proc.job:  # what Ray had started there ends with its node
                    machine.end(proc, "its node was given up")
            machine.join()


async def agent_slow(life: Life, rng: random.Random) -> None:
    """Asked about devices and processes a host takes its time; or more than there is."""
    machine = rng.choice(life.machines[1:3])
    machine.agent_s = rng.choice([2.0, 7.0, 60.0])
    await _for(life, rng.uniform(5.0, 40.0))
    machine.agent_s = 0.005


async def drained(life: Life, rng: random.Random) -> None:
    machine = _host(life, rng)
    life.may_end |= life.jobs_on(machine)
    life.drains += 1
    node_id = machine.node_id
    await _cordon(life, lambda nodes: {*nodes, node_id})
    await _for(life, rng.uniform(1.0, 30.0))
    await _cordon(life, lambda nodes: nodes - {node_id})
    life.drains -= 1


async def _cordon(life: Life, change: Callable[[set[str]], set[str]]) -> None:
    while True:
        try:
            before = await life.plane.ask(None, "cordoned")
            await life.plane.ask(None, "cordon", tuple(sorted(change(set(before)))))
        except RlixError:  # the disk is full
            await asyncio.sleep(1.0)
        else:
            return


# ---- the control plane and people ------------------------------------------------------------------------------------


async def scheduler_crash(life: Life, rng: random.Random) -> None:
    disk = life.plane.disk
    disk.crash_before = rng.random() < 0.5
    disk.crash_at = disk.written + rng.randrange(8)
    await asyncio.sleep(10.0)
    if disk.crash_at >= 0:
        disk.crash_at = -1
        life.plane.crash()


async def disk_full(life: Life, rng: random.Random) -> None:
    life.plane.disk.full = True
    await _for(life, rng.uniform(0.5, 25.0))
    life.plane.disk.full = False


async def disk_slow(life: Life, rng: random.Random) -> None:
    life.plane.disk.slow_s = rng.uniform(0.05, 0.4)
    await _for(life, rng.uniform(1.0, 15.0))
    life.plane.disk.slow_s = 0.0


async def nobody_looks(life: Life, rng: random.Random) -> None:
    """The resource manager is away."""
    life.plane.looks = False
    await _for(life, rng.uniform(1.0, 20.0))
    life.plane.looks = True


async def given_up(life: Life, rng: random.Random) -> None:
    """A person says of quarantined devices that they are free."""
    for _ in range(15):
        await asyncio.sleep(2.0)
        core = life.plane.core
        quarantined = [s.lease for s in core.state.leases.values() if s.state == "quarantined"] if core else []
        for lease in quarantined:
            for device in lease.devices:
                known = {d.id: d.key for d in await life.plane.ask(None, "devices")}
                life.excused.update(known[d] for d in lease.devices if d in known)
                try:
                    await life.plane.ask(None, "give_up_device", device)
                except RlixError:
                    continue


async def stopped_by_a_person(life: Life, rng: random.Random) -> None:
    if (job := _job(life, rng)) and job.id:
        life.may_kill.add(job.name)
        try:
            await life.plane.ask(None, "unregister_pipeline", job.id, "a person wants it", None)
        except RlixError:
            return


async def more_jobs(life: Life, rng: random.Random) -> None:
    for plan in rng.sample(PLANS, 3):
        job = life.add_job(plan)
        if life.drains:
            life.may_end.add(job.name)


KINDS: tuple[Kind, ...] = (
    client_killed,
    worker_killed,
    client_slow,
    client_mute,
    client_hangs,
    program_stopped,
    worker_stopped,
    unkillable,
    liar,
    keeps_its_lock,
    stranger,
    host_lost,
    host_misconfigured,
    partition,
    agent_slow,
    drained,
    scheduler_crash,
    disk_full,
    disk_slow,
    nobody_looks,
    given_up,
    stopped_by_a_person,
    more_jobs,
)


def name(kinds: Sequence[Kind]) -> str:
    return " + ".join(kind.__name__ for kind in kinds)


def draws(count: int, seed: int) -> Iterator[tuple[int, tuple[Kind, ...]]]:
    """`count` lives' seeds and faults: every pair of kinds before one comes again, and in a fifth of them a third."""
    rng = random.Random(seed)
    pairs = list(itertools.combinations_with_replacement(KINDS, 2))
    for number in range(count):
        if number % len(pairs) == 0:
            rng.shuffle(pairs)
        kinds = pairs[number % len(pairs)]
        yield rng.getrandbits(40), (*kinds, rng.choice(KINDS)) if rng.random() < 0.2 else kinds


def live(seed: int, kinds: Sequence[Kind]) -> Verdict:
    """One life in which these faults overlap."""
    life = Life(seed)
    rng = random.Random(seed + 1)
    first = rng.uniform(0.5, 12.0)

    async def injected(kind: Kind, at: float, rng: random.Random) -> None:
        await asyncio.sleep(at)
        await kind(life, rng)

    begins = [first, *(first + rng.uniform(0.0, 8.0) for _ in kinds[1:])]
    rngs = [random.Random(rng.random()) for _ in kinds]
    return life.run([injected(*each) for each in zip(kinds, begins, rngs, strict=True)])
