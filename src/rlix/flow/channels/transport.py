"""The fastest way for a tensor's bytes from where they are to where they are wanted: a pure choice."""

from dataclasses import dataclass
from enum import StrEnum


class Transport(StrEnum):
    """LOCAL needs no move; STAGED goes through host memory and whatever carries messages."""

    LOCAL = "local"
    SHARED_MEMORY = "shared memory"
    CUDA_IPC = "cuda ipc"
    NCCL = "nccl"
    GLOO = "gloo"
    STAGED = "staged"


EVERY = frozenset(Transport)


@dataclass(frozen=True, slots=True)
class End:
    """Where bytes are or go: the node, the process, and the device's key ("" is host memory)."""

    node: str
    process: int
    device: str = ""


def choose(source: End, target: End, *, group: bool = False, can: frozenset[Transport] = EVERY) -> Transport:
    """The best of the transports that both ends `can` use; `group`: both are ranks of one process group."""
    return next((way for way in _ways(source, target, group) if way in can), Transport.STAGED)


def _ways(source: End, target: End, group: bool) -> list[Transport]:
    """Best first."""
    near = source.node == target.node
    if near and source.process == target.process and source.device == target.device:
        return [Transport.LOCAL]
    if bool(source.device) != bool(target.device):
        return []
    if source.device:
        if near and source.device == target.device:
            return [Transport.CUDA_IPC]  # NCCL refuses two ranks on one device
        by_group = [Transport.NCCL] if group else []
        return [*by_group, Transport.CUDA_IPC] if near else by_group
    if near:
        return [Transport.SHARED_MEMORY]
    return [Transport.GLOO] if group else []
