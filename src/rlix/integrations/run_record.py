"""The run folder of a program that attached itself: what a report is made of."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from rlix.control.program import Program
from rlix.integrations.leases import Stage
from rlix.pipeline.jobs.run_folder import RunFolder, Span
from rlix.protocol.errors import RlixError, SpecError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """What kind of program it is, and which of its metrics are those that a report shows."""

    name: str
    metrics: Mapping[str, str]


class RunRecord:
    """Writes `runs/<name>/` of an attached program, as the pipelines that ship do. Thread-safe.

    Raises SpecError when another process writes into the folder, or it cannot be written.
    """

    def __init__(self, program: Program, kind: Kind, runs_dir: Path, cluster: str) -> None:
        self._program = program
        self._kind = kind
        self._cluster = cluster
        path = runs_dir.absolute() / program.name
        try:
            self._folder, _ = RunFolder.open(path)
        except OSError as error:
            raise SpecError(
                f"{program.name}: its run folder {path} cannot be made ({error.strerror}); choose another folder with "
                "RLIX_RUNS_DIR, --runs-dir or runs_dir="
            ) from error
        self._lock = threading.Lock()
        self._leases_written = 0
        self._step = 0
        self._first = True
        self._last_time = time.time()
        self._folder.write_spec(yaml.safe_dump({"name": program.name, "program": kind.name}))
        self._event("job", event="started", detail=None)
        devices = program.client.devices().values()
        self._event("pool", devices=[{"id": d.id, "node_ip": d.node_ip, "kind": str(d.kind)} for d in devices])

    @property
    def folder(self) -> RunFolder:
        return self._folder

    def did(self, stage: Stage, devices: Sequence[int], kind: str, start: float, end: float) -> None:
        """A stage kept devices busy, or bytes moved (`kind`: busy, load or offload). Unix seconds."""
        self._folder.spans([Span(tuple(devices), self._cluster, stage.name, kind, start, end, self._step)])

    def step(self, step: int, values: Mapping[str, object]) -> None:
        """The metrics of step `step` (from 0), under the program's own names and, where known, the report's."""
        now = time.time()
        with self._lock:
            if self._first:
                self._first = False
                self._event("job", event="first_step", detail=None)
            row = {key: value for key, value in values.items() if isinstance(value, int | float)}
            row |= {ours: row[theirs] for ours, theirs in self._kind.metrics.items() if theirs in row}
            self._folder.metrics({**row, "step": step, "time": now, "step_s": now - self._last_time})
            self._step, self._last_time = step + 1, now
            self._write_leases()

    def close(self, error: str | None = None, *, stopped: bool = False) -> None:
        """How it ended: it failed, was stopped in the middle, or finished. Calling it again changes nothing."""
        if not self._folder.is_open:
            return
        with self._lock:
            self._write_leases()
        self._event("job", event="failed" if error else "stopped" if stopped else "finished", detail=error)
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else f"{type(error).__name__}: {error}")

    def _write_leases(self) -> None:
        try:
            for record in self._program.client.lease_log(self._leases_written):
                self._leases_written = record.number
                self._folder.lease(record)
        except RlixError as error:  # the folder is for people; training goes on without
            logger.warning("%s: its leases are not recorded: %s", self._program.name, error)

    def _event(self, type_: str, **fields: object) -> None:
        self._folder.event({"type": type_, "time": time.time(), **fields})
