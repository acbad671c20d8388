"""How a tensor gets from one worker to another: a pure function of where it is and where it is wanted."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from rlix.protocol.messages import DeviceKind


class Carrier(StrEnum):
    SHARED_MEMORY = "shared memory"
    OBJECT_STORE = "object store"
    CUDA_IPC = "CUDA IPC"
    NCCL = "NCCL"
    GLOO = "gloo"


BUILT = frozenset({Carrier.SHARED_MEMORY, Carrier.OBJECT_STORE})
"""What there is code for. The others are known to be better where `route` names them, and fall to staged copies."""


@dataclass(frozen=True, slots=True)
class Place:
    """Memory of a node (`CPU`, which is what a virtual GPU has, too), or of a GPU of it."""

    node: str
    kind: DeviceKind


@dataclass(frozen=True, slots=True)
class Route:
    """`off`: first copied from its device to host memory; `onto`: at the end copied onto the reader's device."""

    carrier: Carrier
    off: bool = False
    onto: bool = False


def route(source: Place, target: Place, built: Collection[Carrier] = BUILT) -> Route:
    """The best of the carriers that are `built`, which are at least the two that any tensor may take."""
    near, on_gpu = source.node == target.node, source.kind is DeviceKind.CUDA
    onto = on_gpu and target.kind is DeviceKind.CUDA
    direct = Carrier.CUDA_IPC if near else Carrier.NCCL
    if onto and direct in built:
        return Route(direct)
    between = Carrier.GLOO if Carrier.GLOO in built else Carrier.OBJECT_STORE
    return Route(Carrier.SHARED_MEMORY if near else between, off=on_gpu, onto=onto)
