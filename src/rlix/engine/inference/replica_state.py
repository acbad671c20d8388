"""The life of a replica as a pure state machine, with the fencing of stale leases."""

from dataclasses import dataclass, replace
from enum import StrEnum

from rlix.protocol.errors import NotResidentError, RlixError, StaleEpochError


class ReplicaPhase(StrEnum):
    OFF = "off"  # nothing on the device
    LOADING = "loading"  # some of it on the device, or on its way
    READY = "ready"  # generates
    DRAINING = "draining"  # ending what it generates, then releasing memory
    DEAD = "dead"  # a load or an offload failed; only loading leads back


class ReplicaStateError(RlixError):
    """A replica was asked for something that its state does not allow."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """`epoch`: of the lease it was last loaded under; `fence`: leases up to this epoch are over.

    Epoch 0 is no lease, and never over.
    """

    phase: ReplicaPhase = ReplicaPhase.OFF
    epoch: int = 0
    fence: int = 0

    def load(self, epoch: int) -> "ReplicaState":
        """Raises StaleEpochError when that lease, or a later one, has already been given back."""
        if 0 < epoch <= self.fence or epoch < self.epoch:
            newest = max(self.fence, self.epoch)
            raise StaleEpochError(f"load under lease {epoch} refused: this replica has seen lease {newest}")
        if self.phase is ReplicaPhase.DRAINING:
            raise ReplicaStateError(f"load under lease {epoch} while draining lease {self.epoch}: wait for its offload")
        return replace(self, phase=ReplicaPhase.LOADING, epoch=epoch)

    def loaded(self) -> "ReplicaState":
        return self._move(ReplicaPhase.READY, ReplicaPhase.LOADING)

    def drain(self, epoch: int) -> "ReplicaState":
        """Raises StaleEpochError when the replica works under a later lease by now."""
        if epoch < self.epoch:
            raise StaleEpochError(f"offload of lease {epoch} refused: this replica works under lease {self.epoch}")
        return replace(self, phase=ReplicaPhase.DRAINING, fence=max(self.fence, epoch))

    def off(self) -> "ReplicaState":
        return self._move(ReplicaPhase.OFF, ReplicaPhase.DRAINING)

    def dead(self) -> "ReplicaState":
        return replace(self, phase=ReplicaPhase.DEAD)

    def check_ready(self) -> None:
        if self.phase is not ReplicaPhase.READY:
            raise NotResidentError(f"generate() on a replica that is {self.phase}; load it first")

    def check_resident(self) -> None:
        if self.phase not in (ReplicaPhase.READY, ReplicaPhase.LOADING):
            raise NotResidentError(f"update() of a replica that is {self.phase}; load it first")

    def _move(self, to: ReplicaPhase, source: ReplicaPhase) -> "ReplicaState":
        if self.phase is not source:
            raise ReplicaStateError(f"a replica that is {self.phase} cannot become {to}; it must be {source}")
        return replace(self, phase=to)
