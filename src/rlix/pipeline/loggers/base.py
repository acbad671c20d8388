"""What a logger is: somebody else's program that is told a job's metrics."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """What loggers know of the run. `first`: number of its first step, above 0 when it was resumed."""

    name: str
    folder: Path
    first: int
    spec: Mapping[str, Any]


class Logger(ABC):
    """Every method is called on one thread of its own, may block and may raise anything."""

    name: str

    @abstractmethod
    def open(self, run: Run) -> None:
        """Before the first row; what it needs is imported here."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics; all of them are finite."""

    @abstractmethod
    def close(self, state: str) -> None:
        """After the last row. `state`: finished, stopped or failed."""


def remembered(file: Path) -> str | None:
    """The id under which an earlier session of the run is known elsewhere."""
    return file.read_text().strip() if file.is_file() else None
