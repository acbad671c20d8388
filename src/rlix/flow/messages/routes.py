"""How a message gets from one worker to another: a pure function of where both are."""

from dataclasses import dataclass
from enum import StrEnum

from rlix.protocol.messages import DeviceKind


class Carrier(StrEnum):
    SHARED_MEMORY = "shared memory"
    OBJECT_STORE = "object store"
    CUDA_IPC = "CUDA IPC"


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's node, and what its devices are; a virtual GPU is `CPU`.

    `gpus`: names of those that its process sees, by their numbers in it.
    """

    node: str
    kind: DeviceKind
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """`carrier`: of what lies in host memory, and of what is brought there from a GPU and then `onto` the reader's.

    What is on one of `ipc`, GPUs that both see, goes through memory of that GPU.
    """

    carrier: Carrier
    onto: bool
    ipc: tuple[str, ...] = ()

    def of(self, gpu: str) -> Carrier:
        """Of a tensor on this GPU ("": in host memory)."""
        return Carrier.CUDA_IPC if gpu in self.ipc else self.carrier


def route(sender: Place, reader: Place, *, cuda_ipc: bool = False) -> Route:
    """`cuda_ipc`: whether the sender may put bytes on GPUs that its reader finds there."""
    near = sender.node == reader.node
    shared = tuple(gpu for gpu in sender.gpus if near and cuda_ipc and gpu in reader.gpus)
    carrier = Carrier.SHARED_MEMORY if near else Carrier.OBJECT_STORE
    return Route(carrier, reader.kind is DeviceKind.CUDA, shared)
