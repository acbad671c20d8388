"""Workers that the tests of this folder start, and how to wait until they are gone."""

import contextlib
import os
import subprocess
import threading
from dataclasses import replace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rlix.workers.worker import Worker, WorkerContext


def wait_gone(pid: int, timeout: float = 20.0) -> None:
    """Until the process has ended and been reaped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout)


class EchoWorker(Worker):
    def __init__(self, greeting: str = "hello", fail_rank: int | None = None) -> None:
        if self.ctx.rank == fail_rank:
            raise LookupError(f"no {greeting} on rank {fail_rank}")
        self.greeting = greeting
        self._released = threading.Event()

    def facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "greeting": self.greeting,
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "env": os.environ.get("FLOW_TEST"),
            "threads": torch.get_num_threads(),
        }

    def context(self) -> WorkerContext:
        return self.ctx

    def add(self, left: Any, right: Any) -> Any:
        return left + right

    def named(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def fail_on(self, rank: int) -> int:
        if self.ctx.rank == rank:
            raise LookupError("nothing here")
        return self.ctx.rank

    def wait_for_release(self) -> bool:
        return self._released.wait(300)

    def release(self) -> None:
        self._released.set()

    def leave_a_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def sum_of_ranks(self, tag: str, members: list[int]) -> float:
        self.ctx.init_process_group(tag=tag, ranks=members)
        total = torch.tensor([float(self.ctx.rank)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return float(total)

    def sum_over_tcp(self, tag: str) -> float:
        """As on several nodes: no folder that every rank can see."""
        self.ctx = replace(self.ctx, rendezvous=None)
        return self.sum_of_ranks(tag, list(range(self.ctx.world_size)))
