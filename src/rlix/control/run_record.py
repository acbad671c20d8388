"""The run folder of a program that attached itself: what a report is made of."""

import functools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import yaml

from rlix.control.program import Program
from rlix.node.run_folder import RunFolder, Span
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.types import folder_problem

logger = logging.getLogger(__name__)

_STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_STOP_TIMEOUT_S = 2.0
OWN = ("step", "time", "step_s")
"""What a row of metrics says of itself, whatever a program calls its numbers."""


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
        if (problem := folder_problem(program.name)) is not None:
            raise SpecError(f"a program's run folder has its name, and {problem}")
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
        self._error: str | None = None
        self._stopped = False
        _watch()
        _open.add(self)
        self._folder.write_spec(yaml.safe_dump({"name": program.name, "program": kind.name}))
        self._event("job", event="started", detail=None)
        devices = program.client.devices().values()
        self._event("pool", devices=[{"id": d.id, "node_ip": d.node_ip, "kind": str(d.kind)} for d in devices])

    @property
    def folder(self) -> RunFolder:
        return self._folder

    def did(
        self, stage: str, devices: Sequence[int], kind: str, start: float, end: float, cluster: str | None = None
    ) -> None:
        """A stage kept devices busy, or bytes moved (`kind`: busy, load or offload). Unix seconds."""
        self._folder.spans([Span(tuple(devices), cluster or self._cluster, stage, kind, start, end, self._step)])

    def step(self, step: int, values: Mapping[str, object], steps: int = 0) -> None:
        """The metrics of step `step` (from 0) of `steps`, 0 where nobody knows: under the program's own names and,
        where known, the report's."""
        now = time.time()
        with self._lock:
            if self._first:
                self._first = False
                self._event("job", event="first_step", detail=None)
            row = {key: value for key, value in values.items() if isinstance(value, int | float)}
            row |= {ours: row[theirs] for ours, theirs in self._kind.metrics.items() if theirs in row}
            own = dict(zip(OWN, (step, now, now - self._last_time), strict=True))
            self._folder.metrics({**row, **own})
            self._step, self._last_time = step + 1, now
            self._error, self._stopped = None, False
            self._write_leases()
        self._program.progress(step + 1, steps, row)

    def broken(self, error: BaseException) -> None:
        """How it ends, unless another step is made: Ctrl-C and a signal's exit code stop it, anything else has failed.

        What nobody catches and `sys.exit` with a code need not be told.
        """
        code = error.code if isinstance(error, SystemExit) else None
        if isinstance(error, SystemExit) and not code:
            return
        self._stopped = isinstance(error, KeyboardInterrupt) or code in _STOP_CODES
        said = f"it ended with exit code {code}" if isinstance(code, int) else str(code or "")
        self._error = None if self._stopped else said or f"{type(error).__name__}: {error}"

    @property
    def is_broken(self) -> bool:
        return self._stopped or self._error is not None

    def close(self, *, stopped: bool = False) -> None:
        """It failed, was stopped in the middle, or finished. Calling it again changes nothing."""
        if not self._folder.is_open:
            return
        with self._lock:
            self._write_leases()
        event = "failed" if self._error else "stopped" if stopped or self._stopped else "finished"
        self._event("job", event=event, detail=self._error)
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.broken(error)
        self.close()

    def _write_leases(self) -> None:
        try:
            for record in self._program.client.lease_log(self._leases_written):
                self._leases_written = record.number
                self._folder.lease(record)
        except RlixError as error:  # the folder is for people; training goes on without
            logger.warning("%s: its leases are not recorded: %s", self._program.name, error)

    def _event(self, type_: str, **fields: object) -> None:
        self._folder.event({"type": type_, "time": time.time(), **fields})


_open: "weakref.WeakSet[RunRecord]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # a fork's end is not the program's


@functools.cache
def _watch() -> None:
    """Python tells nobody with which exit code it ends: hears of it before, as of an error that nobody caught, and of
    SIGTERM where it would be the end."""
    sys.excepthook = functools.partial(_on_uncaught, sys.excepthook)
    sys.exit = functools.partial(_on_exit, sys.exit)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, _: object) -> None:
    """It ends as it would have, once that is noted: by a thread, for this one may be at the same files just now."""
    signal.signal(number, signal.SIG_DFL)
    noting = threading.Thread(target=_note_stop, name="note of the end", daemon=True)
    noting.start()
    noting.join(_STOP_TIMEOUT_S)
    signal.raise_signal(number)


def _note_stop() -> None:
    for record in tuple(_open):
        record.close(stopped=True)


def _on_uncaught(
    before: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    for record in _open:
        record.broken(error)
    before(kind, error, trace)


def _on_exit(before: Callable[..., NoReturn], code: object = None) -> NoReturn:
    if threading.current_thread() is threading.main_thread():  # another thread ends alone
        for record in _open:
            record.broken(SystemExit(code))
    before(code)
