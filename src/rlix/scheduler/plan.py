"""What the planner answers: the changes of one cycle, to be applied in the order shrinks, grants, expands."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shrink:
    """Take the rollout lease `epoch` back. Its devices already belong to a grant or expand of the same plan."""

    epoch: int


@dataclass(frozen=True, slots=True)
class GangGrant:
    """Give the gang request all its devices."""

    request_id: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expand:
    """Give the rollout its bundle number `bundle`."""

    pipeline_id: str
    cluster: str
    bundle: int


@dataclass(frozen=True, slots=True)
class Plan:
    shrinks: tuple[Shrink, ...] = ()
    grants: tuple[GangGrant, ...] = ()
    expands: tuple[Expand, ...] = ()

    def __bool__(self) -> bool:
        """False when nothing changes."""
        return bool(self.shrinks or self.grants or self.expands)
