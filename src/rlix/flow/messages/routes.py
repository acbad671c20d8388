"""How a message gets from one worker to another: a pure function of where both are."""

from dataclasses import dataclass
from enum import StrEnum

from rlix.protocol.messages import DeviceKind


class Carrier(StrEnum):
    SHARED_MEMORY = "shared memory"
    OBJECT_STORE = "object store"


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's node, and what its devices are; a virtual GPU is `CPU`."""

    node: str
    kind: DeviceKind


@dataclass(frozen=True, slots=True)
class Route:
    """`onto`: tensors that came from a GPU are at the end copied onto the reader's; all go through host memory."""

    carrier: Carrier
    onto: bool


def route(sender: str, reader: Place) -> Route:
    """`sender`: its node."""
    carrier = Carrier.SHARED_MEMORY if sender == reader.node else Carrier.OBJECT_STORE
    return Route(carrier, onto=reader.kind is DeviceKind.CUDA)
