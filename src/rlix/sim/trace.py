"""What a run leaves behind, and how it says that it cannot go on."""

from dataclasses import dataclass, field

from rlix.protocol.errors import RlixError
from rlix.sim.ledger import Ledger


class SimulationError(RlixError):
    """The simulated pool stopped making progress; names the jobs that wait and for what."""


@dataclass(slots=True)
class Trace:
    """What a run leaves behind. GPU-seconds; `first` holds until the first job ends."""

    ledger: Ledger
    finished: dict[str, float] = field(default_factory=dict)  # job -> seconds from arrival to its end
    ended_s: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    switches: int = 0
    unused_gpu_s: float = 0.0
    prefill_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0  # gangs that failed on the way
    first: tuple[float, float, float] | None = None  # seconds, tight, useful
    first_steps: int = 0
    plan_ms: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)  # gangs, from request to running
