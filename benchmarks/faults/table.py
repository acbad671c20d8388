"""What was injected, and how it went."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault. Times are seconds since the injection; None: it did not happen in time.

    `noticed_s`: until the control plane knew (a stopped process is given time to go on); 0 where it need not notice.
    `grants_s`: until a device was granted again. `lost`: units of work to be done again (`unit`).
    """

    kind: str
    recovered_s: float | None
    noticed_s: float = 0.0
    grants_s: float | None = None
    survived: bool = True
    note: str = ""

    @property
    def bare_s(self) -> float | None:
        """Recovery without the time until it was noticed."""
        return None if self.recovered_s is None else max(0.0, self.recovered_s - self.noticed_s)

    def line(self) -> str:
        took = "never" if self.recovered_s is None else f"{self.recovered_s:.2f} s"
        return f"{self.kind:<40} {'ok' if self.survived else 'NOT SURVIVED'} {took} {self.note}"


def quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def table(faults: Sequence[Fault]) -> str:
    lines = [
        "| fault | injected | survived | recovery p50 | p99 | without grace p50 | p99 | grants again p50 | p99 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    kinds = sorted({fault.kind for fault in faults})
    lines += [_line(kind, [fault for fault in faults if fault.kind == kind]) for kind in kinds]
    return "\n".join([*lines, _line("all", faults)])


def _line(kind: str, faults: Sequence[Fault]) -> str:
    columns = [
        [f.recovered_s for f in faults if f.recovered_s is not None],
        [f.bare_s for f in faults if f.bare_s is not None],
        [f.grants_s for f in faults if f.grants_s is not None],
    ]
    times = " | ".join(f"{quantile(c, 0.5):.2f} | {quantile(c, 0.99):.2f}" if c else "– | –" for c in columns)
    return f"| {kind} | {len(faults)} | {sum(f.survived for f in faults)} | {times} |"
