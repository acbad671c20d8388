"""What the devices of this machine are called: GPUs by their UUIDs, as `CUDA_VISIBLE_DEVICES` leaves them."""

import logging
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Device, DeviceKind

logger = logging.getLogger(__name__)

VIRTUAL_KEYS = "virtual-"
_TOOL_TIMEOUT_S = 20.0
_GPU_LINE = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_CONTEXT = 2 * 2**30
_MEMORY_LINE = re.compile(r"(\d+), *(\d+)")
_MIG_LINE = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, in the order of its number, and the MIG instances it is split into."""

    uuid: str
    instances: tuple[str, ...] = ()


def virtual_key(node_id: str) -> str:
    """What the keys of a node's virtual devices begin with; their numbers follow."""
    return f"{VIRTUAL_KEYS}{node_id[:12]}-"


def device_keys() -> tuple[str, ...]:
    """The keys of the GPUs that programs on this machine may use, in order; run where the node's Ray was started.

    Raises:
        RlixError: `nvidia-smi` failed, or `CUDA_VISIBLE_DEVICES` names what is not there.
    """
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return ()
    except subprocess.TimeoutExpired:
        raise RlixError(f"nvidia-smi -L did not end within {_TOOL_TIMEOUT_S:g} s: is the driver well?") from None
    if listing.returncode:
        raise RlixError(f"nvidia-smi -L failed: {(listing.stderr or listing.stdout).strip()}")
    return visible(gpus_in(listing.stdout), os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_memory(keys: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Bytes free and in all of GPUs by their UUIDs, without a CUDA context, which would take some itself.

    Raises:
        RlixError: `nvidia-smi` failed, or says nothing of one of them.
    """
    query = [
        "nvidia-smi",
        "--query-gpu=memory.free,memory.total",
        "--format=csv,noheader,nounits",
        "-i",
        ",".join(keys),
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise RlixError(f"nvidia-smi does not say how much memory is free: {error}") from None
    return memory_in(answer.stdout, keys)


def machine_memory() -> int | None:
    """Bytes of the smallest GPU of this machine; None where there is none."""
    try:
        keys = device_keys()
        return min(total for _, total in gpu_memory(keys)) if keys else None
    except RlixError as error:
        logger.info("the machine's GPUs are not known: %s", error)
        return None


def smallest_memory(devices: Iterable[Device]) -> int | None:
    """Bytes of the smallest GPU among a pool's devices, as far as they are this machine's."""
    return None if any(device.kind is not DeviceKind.CUDA for device in devices) else machine_memory()


def usable(memory: int, processes: int = 1) -> int:
    """Of a GPU's memory: without what CUDA, NCCL and fragmentation take for each process that uses it."""
    return memory - processes * min(_CONTEXT, memory // 10)


def memory_in(answer: str, keys: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Bytes free and in all from what `nvidia-smi` prints in MiB, a line for each of `keys`."""
    found = [_MEMORY_LINE.fullmatch(line.strip()) for line in answer.splitlines() if line.strip()]
    if len(found) != len(keys) or None in found:
        raise RlixError(f"nvidia-smi does not say how much memory of {', '.join(keys)} is free: {answer.strip()!r}")
    return tuple((int(match[1]) * 2**20, int(match[2]) * 2**20) for match in found if match)


def gpus_in(listing: str) -> tuple[Gpu, ...]:
    """The GPUs in what `nvidia-smi -L` prints."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        if match := _GPU_LINE.match(line):
            gpus.append(Gpu(match[2]))
        elif gpus and (match := _MIG_LINE.match(line)):
            gpus[-1] = Gpu(gpus[-1].uuid, (*gpus[-1].instances, match[1]))
    return tuple(gpus)


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[str, ...]:
    """The UUIDs that a value of `CUDA_VISIBLE_DEVICES` leaves, in its order; None: of every GPU.

    Numbers are those that `nvidia-smi` shows; as in CUDA, a UUID may be cut short while it is unique, and the list
    ends at the first -1. A GPU that is split counts as its MIG instances.

    Raises:
        RlixError: an entry is no GPU of this machine, or is there twice.
    """
    if setting is None:
        return tuple(uuid for gpu in gpus for uuid in gpu.instances or (gpu.uuid,))
    chosen: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry in ("", "-1", "NoDevFiles"):
            break
        uuid = _named(gpus, entry)
        if uuid is None or uuid in chosen:
            known = ", ".join(f"{i}: {gpu.uuid}" for i, gpu in enumerate(gpus)) or "none"
            wrong = "is no GPU of this machine" if uuid is None else "is there twice"
            raise RlixError(f"CUDA_VISIBLE_DEVICES={setting}: {entry!r} {wrong}; its GPUs: {known}")
        chosen.append(uuid)
    return tuple(chosen)


def _named(gpus: tuple[Gpu, ...], entry: str) -> str | None:
    if entry.isdecimal():
        if int(entry) >= len(gpus):
            return None
        gpu = gpus[int(entry)]
        return gpu.instances[0] if gpu.instances else gpu.uuid  # CUDA shows one instance of a split GPU
    names = [uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.instances)]
    found = [uuid for uuid in names if uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None
