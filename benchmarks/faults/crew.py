"""A light job: a program with its own workers, which rolls out, trains, and rolls out again, for ever."""

import logging
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import ray

from benchmarks.faults.worker import Hold, Witness, Work, worker
from rlix.control.init import init
from rlix.control.program import Program, attach
from rlix.control.rollout_lease import Granted, Lost, RolloutLease, Taken
from rlix.node.process import describe
from rlix.protocol.errors import DeviceBusyError, RlixError, StaleEpochError
from rlix.protocol.messages import Device, Lease
from rlix.protocol.types import Phase

logger = logging.getLogger(__name__)
CONTEXT = multiprocessing.get_context("forkserver")
PHASES = (Phase.ACTOR_TRAINING, Phase.OLD_LOG_PROBS, Phase.REFERENCE_LOG_PROBS, Phase.CRITIC_TRAINING)


class RankDiedError(Exception):
    """A worker of a gang died: the step is done again."""


class Member:
    """One worker process, as its program sees it; a dead one is replaced by `renew`."""

    def __init__(self, job: Program, cluster: str, rank: int, witness: Path) -> None:
        self._job, self._cluster, self._rank, self._witness = job, cluster, rank, witness
        self.lease: Lease | None = None
        self.item: Any = None
        self.state = "off"  # asked to hold, holds, freeing
        self.renew()

    def renew(self) -> None:
        ours, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=worker, args=(theirs, self._witness))
        self.process.start()
        theirs.close()
        self.pipe = ours
        assert self.process.pid is not None
        described = describe(self.process.pid, self._job.client.process.node_id)
        if described is not None:
            self._job.name_holders(self._cluster, {self._rank: described})
        self.lease, self.item, self.state = None, None, "off"

    def hold(self, lease: Lease, keys: dict[int, str], devices: tuple[int, ...]) -> None:
        self.lease, self.state = lease, "asked"
        self.send(Hold(tuple(keys[device] for device in devices), self._job.client.fence(lease)))

    def send(self, order: object) -> None:
        try:
            self.pipe.send(order)
        except (BrokenPipeError, ConnectionResetError):
            logger.info("a worker of %s died", self._cluster)

    def answer(self) -> tuple[str, int, Any] | None:
        try:
            return self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, ConnectionResetError):
            return None

    @property
    def dead(self) -> bool:
        return not self.process.is_alive()


class Crew:
    """One life of the job's program; the next one goes on from the ledger."""

    def __init__(self, name: str, gang: int, folder: Path, seed: int, *, at_home: bool) -> None:
        here = devices_here() if at_home else None
        self.job = attach(name, gangs={"train": here[:gang] if here else gang}, rollouts={"roll": here})
        self.keys = {device: known.key for device, known in self.job.client.devices().items()}
        self.folder, self.random = folder, random.Random(seed)
        self.witness = Witness(folder / "witness")
        clusters = {cluster.name: cluster for cluster in self.job.registration.clusters}
        self.trainers = [Member(self.job, "train", rank, self.witness.folder) for rank in range(gang)]
        self.replicas = [
            Member(self.job, "roll", rank, self.witness.folder) for rank in range(len(clusters["roll"].bundles))
        ]
        self.todo: list[tuple[int, int]] = []
        self.left = 0
        self.finished = threading.Event()
        self.ledger = (folder / f"{name}.ledger").open("a")
        self.lost = (folder / f"{name}.lost").open("a")

    def run(self, first: int) -> None:
        threading.Thread(target=or_die, args=(self._roll,), daemon=True).start()
        number = first
        while True:
            self.finished.clear()
            count = self.random.randint(6, 20)
            self.left = count
            self.todo = [(number, i) for i in range(count)]
            if not self.finished.wait(120):
                raise RlixError(f"round {number}: {self.left} trajectories were not finished within 120 s")
            while not self._train():
                self._lose("step", number)
            self.ledger.write(f"step {number} {count}\n")
            self.ledger.flush()
            number += 1

    def _lose(self, what: str, item: object) -> None:
        self.lost.write(f"{what} {item}\n")
        self.lost.flush()

    # -- gangs

    def _train(self) -> bool:
        try:
            with self.job.client.phase("train", self.random.choice(PHASES), 90) as lease:
                try:
                    for rank, member in enumerate(self.trainers):
                        member.hold(lease, self.keys, lease.devices[rank :: len(self.trainers)])
                    self._all("holds")
                    for member in self.trainers:
                        member.send(Work("step", self.random.uniform(0.05, 0.2)))
                    self._all("done")
                    for member in self.trainers:
                        member.send("free")
                    self._all("free")
                except RankDiedError:
                    for member in self.trainers:  # what is left of a broken group is ended, as a train engine does
                        member.process.kill()
                        member.process.join(10)
                        member.renew()
                    raise
        except (RankDiedError, StaleEpochError) as error:
            logger.info("a step is done again: %s", error)
            return False
        return True

    def _all(self, state: str) -> None:
        deadline = time.monotonic() + 60
        missing = set(self.trainers)
        while missing:
            wait([part for m in missing for part in (m.pipe, m.process.sentinel)], 5)
            for member in list(missing):
                answer = member.answer()
                if answer is not None and answer[0] == state:
                    missing.discard(member)
                elif answer is not None or member.dead or time.monotonic() > deadline:
                    raise RankDiedError(f"{state} awaited, got {answer or 'its end'}")

    # -- rollout

    def _roll(self) -> None:
        rollout = RolloutLease(self.job.client, "roll")
        reported, at = -1, 0.0
        while True:
            if self.left != reported or time.monotonic() - at > 2:
                reported, at = self.left, time.monotonic()
                rollout.report(reported)
            for change in rollout.poll(0.05):
                self._change(rollout, change)
            for member in self.replicas:
                self._drive(rollout, member)

    def _change(self, rollout: RolloutLease, change: Granted | Taken | Lost) -> None:
        assert change.lease.bundle is not None
        member = self.replicas[change.lease.bundle]
        match change:
            case Granted(lease):
                member.hold(lease, self.keys, lease.devices)
            case Taken(lease) if member.lease == lease:
                member.state = "freeing"
                member.send("free")
            case Lost(lease) if member.lease == lease:
                self._again(member)
                member.process.kill()
                member.process.join(10)
                member.renew()

    def _drive(self, rollout: RolloutLease, member: Member) -> None:
        while (answer := member.answer()) is not None:
            kind = answer[0]
            if kind == "done":
                self._done(member)
            elif kind == "holds" and member.state == "asked":
                member.state = "holds"
            elif kind in ("free", "busy") and member.lease is not None:
                if kind == "busy":
                    self.witness.violation("busy", answer[2])
                lease, member.lease, member.state = member.lease, None, "off"
                rollout.give_back(lease)
        if member.dead:
            self._again(member)
            dead_of = member.lease
            member.renew()
            if dead_of is not None:
                rollout.give_back(dead_of)
        elif member.state == "holds" and member.item is None and self.todo:
            member.item = self.todo.pop()
            member.send(Work(member.item, self.random.uniform(0.05, 0.25)))

    def _done(self, member: Member) -> None:
        if member.item is None:
            return
        self.ledger.write(f"trajectory {member.item[0]} {member.item[1]}\n")
        self.ledger.flush()
        member.item = None
        self.left -= 1
        if not self.left:
            self.finished.set()

    def _again(self, member: Member) -> None:
        if member.item is not None:
            self._lose("trajectory", member.item)
            self.todo.append(member.item)
            member.item = None


def or_die(work: Callable[[], None]) -> None:
    """A program that fails ends: whoever supervises it starts the next one."""
    try:
        work()
    except RlixError:
        logger.exception("the program ends")
    finally:
        os._exit(1)


def devices_here() -> list[int]:
    """Those of this host: where the program's own workers can be."""
    pool: tuple[Device, ...] = ray.get(init(log_level="WARNING").devices.remote(), timeout=60)
    return [device.id for device in pool if device.node_id == ray.get_runtime_context().get_node_id()]


def crew(name: str, gang: int, folder: Path, seed: int, *, at_home: bool = False) -> None:
    """The program's process. `at_home`: it uses devices of its own host only."""
    _log(folder, name)
    path = folder / f"{name}.ledger"
    steps = [int(line.split()[1]) for line in path.read_text().splitlines() if line[0] == "s"] if path.exists() else []
    first = max(steps, default=-1) + 1
    with path.open("a") as ledger:
        ledger.write(f"restart {first}\n")  # what the round had is done again
    or_die(lambda: Crew(name, gang, folder, seed + first, at_home=at_home).run(first))


def script(name: str, gang: int, folder: Path, seed: int, *, at_home: bool = False) -> None:
    """A program that is its own worker: `rlix.attach` in a plain script."""
    _log(folder, name)
    rng, witness = random.Random(seed), Witness(folder / "witness")

    def run() -> None:
        with attach(name, gangs={"mine": devices_here()[:gang] if at_home else gang}) as job:
            keys = {device: known.key for device, known in job.client.devices().items()}
            while True:
                try:
                    with job.phase(rng.choice(PHASES), timeout_s=90) as lease:
                        (first, *others), used = [keys[device] for device in lease.devices], lease.epoch
                        with witness.using([first], used):
                            with witness.using(others, used):
                                time.sleep(rng.uniform(0.05, 0.3))
                            if others and rng.random() < 0.5:
                                job.give_back(lease, lease.devices[1:])
                                time.sleep(rng.uniform(0.05, 0.3))
                except DeviceBusyError as error:
                    witness.violation("busy", str(error))
                except StaleEpochError as error:
                    logger.info("%s", error)
                time.sleep(0.05)

    or_die(run)


def _log(folder: Path, name: str) -> None:
    logging.basicConfig(
        level=logging.INFO, filename=folder / f"{name}.log", format="%(asctime)s %(process)d %(name)s: %(message)s"
    )
