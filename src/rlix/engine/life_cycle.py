"""Where an engine's bytes are, which weights they are, and under which lease: one pure state machine for all who ask.

A handle, a replica, a training rank, an executor and a `ResidentSet` each keep one `Life`. It holds facts (which parts
are on the devices, which weights are known to be whole), and the phase follows from them, so no two flags can disagree.

    off ──────► partly resident ──► resident ──► serving ──► draining ──► host, or off
     ▲ host ──────────▲                 (a failure in any of these: failed; from there loading or draining leads on)

Weights become current (`filled`) when every byte of them is in place; from the first byte that replaces them until then
they are nobody's (`overwriting`), and nothing computes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlix.protocol.errors import NotResidentError, StaleEpochError


class Part(StrEnum):
    """What of an engine occupies a device. An inference engine's parts can be brought back one after the other."""

    WEIGHTS = "weights"  # of a trainer: with gradients and optimizer state
    KV_CACHE = "kv_cache"


class Phase(StrEnum):
    OFF = "off"  # no bytes anywhere
    HOST = "host"  # weights wait in host memory
    PARTIAL = "partly resident"  # some of its parts are on the devices
    RESIDENT = "resident"  # all parts are there, but the weights are not whole (yet)
    SERVING = "serving"  # all parts are there and the weights are whole: it computes
    DRAINING = "draining"  # ending what it computes, then releasing memory
    FAILED = "failed"  # a transition broke off; `failure` says what happened, loading or draining leads on


class Residency(StrEnum):
    """A phase as PyTorch sees it: where the bytes are."""

    DEVICE = "device"
    HOST = "host"
    META = "meta"  # the bytes are gone; only names and shapes remain


REBUILD = "close() the engine and build() it again"
"""What to do where a worker is gone: no move brings it back."""
SOURCE_VERSION = -1
"""The version of weights that came with the model's folder and were never published."""


@dataclass(frozen=True, slots=True)
class WeightsId:
    """Which weights these are. Numbers begin anew with each trainer, so a publication has a name of its own as well."""

    version: int
    publication: str = ""


SOURCE = WeightsId(SOURCE_VERSION)
TRAINING_PARTS = frozenset({Part.WEIGHTS})
INFERENCE_PARTS = frozenset(Part)


@dataclass(frozen=True, slots=True)
class Life:
    """One state. Every method returns the next one, or raises and changes nothing.

    Attributes:
        whole: the parts that make it complete.
        on: those on the devices.
        weights: which weights it has, on the devices or waiting in host memory; None: none that are whole.
        failure: what broke off, while that is not made good.
        epoch: of the lease it works under; 0: none, which is never over.
        ended: leases up to this epoch are over.
    """

    whole: frozenset[Part] = INFERENCE_PARTS
    on: frozenset[Part] = frozenset()
    weights: WeightsId | None = None
    draining: bool = False
    failure: str = ""
    epoch: int = 0
    ended: int = 0

    @property
    def phase(self) -> Phase:
        if self.draining:
            return Phase.DRAINING
        if self.failure:
            return Phase.FAILED
        if self.on == self.whole:
            return Phase.RESIDENT if self.weights is None else Phase.SERVING
        if self.on:
            return Phase.PARTIAL
        return Phase.OFF if self.weights is None else Phase.HOST

    @property
    def residency(self) -> Residency:
        if self.on:
            return Residency.DEVICE
        return Residency.META if self.weights is None else Residency.HOST

    @property
    def version(self) -> int:
        """Of its weights; -1 for the source's own, and where there are none."""
        return SOURCE_VERSION if self.weights is None else self.weights.version

    # ---- leases ----------------------------------------------------------------------------------------------

    def enter(self, epoch: int) -> "Life":
        """From now on it works under this lease.

        Raises:
            StaleEpochError: that lease, or a later one, has been given back already.
            NotResidentError: it is still draining.
        """
        if 0 < epoch <= self.ended:
            raise StaleEpochError(f"epoch {epoch} refused: it has ended (the newest that has is {self.ended})")
        if epoch < self.epoch:
            raise StaleEpochError(f"epoch {epoch} refused: epoch {self.epoch} holds it now")
        if self.draining:
            raise NotResidentError(f"epoch {epoch} refused while epoch {self.epoch} drains: wait for its offload")
        return replace(self, epoch=epoch)

    def drain(self, epoch: int = 0) -> "Life":
        """No new work, and the lease is over. Raises StaleEpochError when a later one is in force."""
        if epoch < self.epoch:
            raise StaleEpochError(f"the end of epoch {epoch} refused: epoch {self.epoch} holds it now")
        return replace(self, draining=True, ended=max(self.ended, epoch))

    # ---- bytes -----------------------------------------------------------------------------------------------

    def brought(self, *parts: Part) -> "Life":
        """These parts are on the devices now. Raises NotResidentError for a KV cache without weights."""
        on = self.on | {*parts}
        if Part.KV_CACHE in on and Part.WEIGHTS not in on:
            raise NotResidentError("the KV cache was asked for before the weights: load the weights first")
        made_good = on == self.whole and self.weights is not None
        return replace(self, on=on, failure="" if made_good else self.failure)

    def overwriting(self) -> "Life":
        """From the first byte that replaces the weights on the devices until `filled`."""
        self.check_part(Part.WEIGHTS)
        return replace(self, weights=None)

    def filled(self, weights: WeightsId) -> "Life":
        """Every byte of these weights is on the devices, and was checked."""
        self.check_part(Part.WEIGHTS)
        return replace(self, weights=weights, failure="")

    def failed(self, reason: str, *lost: Part) -> "Life":
        """A transition broke off; the parts in `lost` have to be brought anew."""
        weights = None if Part.WEIGHTS in lost else self.weights
        on = frozenset() if Part.WEIGHTS in lost else self.on - {*lost}
        return replace(self, failure=reason, draining=False, on=on, weights=weights)

    def released(self, *, keep_host: bool) -> "Life":
        """The devices' memory is free; with `keep_host`, weights that are whole wait in host memory."""
        return replace(self, on=frozenset(), draining=False, failure="", weights=self.weights if keep_host else None)

    # ---- what is allowed -------------------------------------------------------------------------------------

    def check_part(self, part: Part) -> None:
        """Raise NotResidentError unless this part is on the devices."""
        if part not in self.on:
            raise NotResidentError(f"its {part} are not on the devices{self._advice()}")

    def check_serving(self, who: str = "it") -> None:
        """Raise NotResidentError unless it can compute now; says what to call."""
        if self.phase is Phase.SERVING:
            return
        self.check_accepting(who)
        raise NotResidentError(f"{who} has no whole weights{self._why()}: load some with cuda(), or update them")

    def check_accepting(self, who: str = "it") -> None:
        """Raise NotResidentError unless it computes now, or will once the weights that are arriving are whole."""
        if self.draining:
            raise NotResidentError(f"{who} is draining: call cuda() (or load it) once that has ended")
        if self.failure or self.on != self.whole:
            missing = " and ".join(sorted(self.whole - self.on))
            where = f"is {self.phase}" + (f", without {missing} on its devices" if missing else "")
            raise NotResidentError(f"{who} {where}{self._advice()}")

    def _advice(self) -> str:
        return self._why() if REBUILD in self.failure else f"{self._why()}: call cuda() first (or load it)"

    def _why(self) -> str:
        return f" ({self.failure})" if self.failure else ""


def training(*, resident: bool) -> Life:
    """Of a trainer's bytes, which are one part and define themselves."""
    return Life(TRAINING_PARTS, TRAINING_PARTS if resident else frozenset(), SOURCE if resident else None)


def joint(lives: Sequence[Life | str], called: str = "replica") -> Life:
    """Of several that are used as one; a text stands for one that cannot be asked, and says why.

    Where they differ, in where their bytes are or in which weights these are, the whole counts as failed: it could
    answer, but from different weights.
    """
    known = [life for life in lives if isinstance(life, Life)]
    first = known[0] if known else Life()
    problems = [
        f"{called} {number}: {life if isinstance(life, str) else life.failure}"
        for number, life in enumerate(lives)
        if isinstance(life, str) or life.failure
    ]
    if not problems and len({(life.phase, life.on) for life in known}) > 1:
        problems = [f"{called} {number} is {life.phase}" for number, life in enumerate(known)]
    elif not problems and len({life.weights for life in known}) > 1:
        problems = [_different_weights(known, called)]
    if not problems:
        return first
    on = frozenset[Part].union(*(life.on for life in known)) if known else frozenset()
    weights = next((life.weights for life in known if life.weights is not None), None)
    return replace(first, on=on, weights=weights, draining=False, failure="; ".join(problems))


def _different_weights(lives: Iterable[Life], called: str) -> str:
    each = ", ".join(f"{called} {number} version {life.version}" for number, life in enumerate(lives))
    return f"their weights differ ({each}); update all of them, or meta() and then cuda()"
