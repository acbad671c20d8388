"""A light job over every host: a gang with a device on each, held by a process there."""

import logging
import random
import time
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.faults.crew import PHASES, or_die
from benchmarks.faults.worker import Witness
from rlix.control.init import init
from rlix.control.program import attach
from rlix.node.device_lock import DeviceLocks
from rlix.node.process import this_process
from rlix.protocol.messages import Device, Fence, Process

logger = logging.getLogger(__name__)
_ANSWER_S = 60.0


class Part:
    """Ray actor: the gang's process on one host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def process(self) -> Process:
        return this_process(ray.get_runtime_context().get_node_id(), "wide")

    def work(self, key: str, fence: Fence, seconds: float) -> None:
        locks = DeviceLocks([key])
        locks.acquire(fence, 10.0)
        try:
            with Witness(self._folder / key).using([key], fence.epoch):
                time.sleep(seconds)
        finally:
            locks.release()


def wide(name: str, gang: int, folder: Path, seed: int) -> None:
    """The program's process: it ends when anything goes wrong, and whoever supervises it starts the next one."""
    logging.basicConfig(level=logging.INFO, filename=folder / f"{name}.log")
    or_die(lambda: _run(name, gang, folder, random.Random(seed)))


def _run(name: str, gang: int, folder: Path, rng: random.Random) -> None:
    pool: tuple[Device, ...] = ray.get(init(log_level="WARNING").devices.remote(), timeout=_ANSWER_S)
    mine = list({device.node_id: device for device in pool}.values())[:gang]
    parts = [
        ray.remote(num_cpus=0)(Part)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(device.node_id, soft=False))
        .remote(folder / "witness")
        for device in mine
    ]
    with attach(name, gangs={"wide": [device.id for device in mine]}) as job:
        processes = ray.get([part.process.remote() for part in parts], timeout=_ANSWER_S)
        job.name_holders("wide", dict(enumerate(processes)))
        while True:
            try:
                with job.client.phase("wide", rng.choice(PHASES), 90) as lease:
                    fence, seconds = job.client.fence(lease), rng.uniform(0.1, 0.5)
                    work = [part.work.remote(d.key, fence, seconds) for part, d in zip(parts, mine, strict=True)]
                    ray.get(work, timeout=_ANSWER_S)
            except (RayError, GetTimeoutError):
                logger.exception("a part is gone")
                return
            time.sleep(0.2)
