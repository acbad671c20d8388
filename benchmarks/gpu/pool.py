"""Engines and jobs need a control plane: what the sections that start one share."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import rlix
from rlix.node.devices import gpu_memory
from rlix.protocol.messages import Device, DeviceKind


@contextmanager
def pool() -> Iterator[tuple[Device, ...]]:
    """The machine's GPUs; without one, two virtual ones."""
    rlix.init(virtual_gpus=2, address="local", log_level="WARNING")
    try:
        yield rlix.pool_devices()
    finally:
        rlix.shutdown()


def used_mb(devices: tuple[Device, ...]) -> float:
    """Of all memory of these GPUs, whoever uses it; 0 of virtual ones."""
    keys = [device.key for device in devices if device.kind is DeviceKind.CUDA]
    return sum(total - free for free, total in gpu_memory(keys)) / 1e6 if keys else 0.0


def program(*arguments: str, limit_s: float) -> str:
    """What a Python program in a process of its own says; raises AssertionError with the end of it where it fails."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    expect(ended.returncode == 0, f"{' '.join(arguments)} ended with {ended.returncode}: {ended.stdout[-2000:]}")
    return ended.stdout


def spent(action: Callable[[], object]) -> float:
    """Seconds."""
    start = perf_counter()
    action()
    return perf_counter() - start


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)
