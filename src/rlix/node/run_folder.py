"""The folder `runs/<name>/` where one job's spec, metrics, events and checkpoints live."""

import contextlib
import errno
import glob
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rlix.node.file_lock import FileBusyError, lock_file
from rlix.node.manifest import damage
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import LeaseRecord

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
Checkpoint = tuple[int, Path]  # the number of finished steps, and where
_CHECKPOINT = re.compile(r"step_(\d+)")
METRICS = "metrics.jsonl"
"""A row for each step that was done."""
_BY_STEP = (METRICS, "samples.jsonl")
_LOCK = ".lock"
_EARLIER = ".earlier"
"""In a run's folder: the name of the run before it, which has its place again if this one does no step."""
QUEUED = ".queued"
"""Beside the run folder of a job that a queue has started: its number there."""
PARTIAL = ".partial"
_BROKEN = ".broken"
_ASIDE = r"-\d{8}-\d{6}(-\d+)?"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Span:
    """What one device did for a job, in Unix seconds. `kind`: busy, load, offload or sync."""

    devices: tuple[int, ...]
    cluster: str
    phase: str
    kind: str
    start: float
    end: float
    step: int


class RunFolder:
    """A run's files: JSONL files (one line per record, safe from several threads), spec and checkpoints.

    Whoever writes has opened it with `open`, which one process at a time can do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_open = False
        self.set_aside: list[str] = []  # checkpoints that were not gone on from, and why
        self.earlier: Path | None = None  # where the run is that had this folder before
        self._writing = threading.Lock()
        self._lock: TextIO | None = None

    @staticmethod
    def open(path: Path, *, resume: bool = False, wait_s: float | None = None) -> "tuple[RunFolder, Checkpoint | None]":
        """Makes the run folder this process's, and clean: what a death left half written is removed.

        With `resume`, and where there is a complete checkpoint, the run goes on from the one that is returned: metrics
        and samples of steps that will be done again are dropped, and torn lines. Else the folder is new: an earlier run
        of the same name is moved aside, to `earlier`, never overwritten; `give_back` undoes that.

        Args:
            wait_s: how long to wait for another process, perhaps just killed, to let go of the folder; default: 5 s.

        Raises:
            SpecError: another process writes into it, or none of its checkpoints is whole; nothing was changed.
        """
        folder = RunFolder(path)
        folder._own(wait_s)
        aside = aside_of(path)
        _remove_partial(path)
        checkpoint = folder._whole_checkpoint() if resume else None
        if checkpoint is not None:
            folder._trim(checkpoint[0])
        elif aside is not None:
            path.rename(aside)
            folder.earlier = _displaced(aside) or aside
            folder._own(wait_s)  # lets go of the old one only when it has the new one
            replace_file(path / _EARLIER, folder.earlier.name.encode())
        return folder, checkpoint

    def give_back(self) -> Path | None:
        """For a run that came to no step: the run that had the folder before has it again, if it has checkpoints.

        Returns where this one's files are from now on; None where they stay.
        """
        if self.earlier is None or not list_checkpoints(self.earlier / "checkpoints"):
            return None
        if (self.path / METRICS).exists():
            return None
        aside = aside_of(self.path)
        if aside is None:
            return None
        _swap(self.path, aside, self.earlier)
        self.path, self.earlier = aside, None
        return aside

    def close(self) -> None:
        """Lets others write into the folder. Calling it again changes nothing."""
        self.is_open = False
        if self._lock is not None:
            self._lock.close()

    def _own(self, wait_s: float | None) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        before, self._lock = self._lock, _lock(self.path, wait_s)
        if before is not None:
            before.close()
        self.is_open = True

    def _trim(self, step: int) -> None:
        """Drops rows of steps that will be done again, and lines that a death left torn: in any file of lines."""
        for path in sorted(self.path.glob("*.jsonl")):
            content = path.read_bytes()
            lines = [line for line in content.split(b"\n") if line]
            whole = [line for line in lines if _is_row(line)]
            if len(whole) < len(lines):
                logger.warning("%s: %d torn lines were dropped", path, len(lines) - len(whole))
            kept = [line for line in whole if path.name not in _BY_STEP or _step_of(line) < step]
            if (text := b"".join(line + b"\n" for line in kept)) != content:
                replace_file(path, text)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _whole_checkpoint(self) -> Checkpoint | None:
        """The newest that has lost nothing. What is broken gets another name and is told in `set_aside`."""
        checkpoint, broken = newest_checkpoint(self.path)
        for path, what in broken:
            shutil.rmtree(path.with_suffix(_BROKEN), ignore_errors=True)  # of an earlier time
            path.rename(path.with_suffix(_BROKEN))
            self.set_aside.append(f"{path.name} is broken: {what}")
            logger.warning("%s is not gone on from: %s", path, what)
        return checkpoint

    def write_spec(self, text: str) -> None:
        replace_file(self.path / "spec.yaml", text.encode())

    def metrics(self, row: dict[str, Any]) -> None:
        self._append(METRICS, [row])

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        self._append("samples.jsonl", rows)

    def event(self, row: dict[str, Any]) -> None:
        self._append("events.jsonl", [row])

    def lease(self, record: LeaseRecord) -> None:
        """Note what happened to a lease."""
        lease = record.lease
        self.event(
            {
                "type": "lease",
                "event": record.event,
                "epoch": lease.epoch,
                "cluster": lease.cluster,
                "phase": lease.phase.name.lower(),
                "devices": list(lease.devices),
                "time": record.time,
                "reason": record.reason,
                "waited_s": record.waited_s,
            }
        )

    def spans(self, spans: Sequence[Span]) -> None:
        rows = []
        for span in spans:
            row = {"type": "span", **asdict(span)}
            del row["devices"]
            rows += [{**row, "device": device} for device in span.devices]
        self._append("events.jsonl", rows)

    def _append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with self._writing:
            file = os.open(self.path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                _write_whole(file, text)
            finally:
                os.close(file)


def check_free(path: Path, wait_s: float | None = None) -> None:
    """Raises SpecError when another process of this machine writes into the run folder `path`."""
    if (path / _LOCK).exists() and (lock := _lock(path, wait_s)) is not None:
        lock.close()


def _lock(folder: Path, wait_s: float | None) -> TextIO | None:
    try:
        return lock_file(folder / _LOCK, LOCK_WAIT_S if wait_s is None else wait_s)
    except FileBusyError as error:
        raise SpecError(
            f"run folder {folder} is in use by {error}; give the other run another name or --runs-dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("cannot lock the run folder %s (%s): two runs must not use it at a time", folder, error)
        return None


def take_back(path: Path, wait_s: float | None = None) -> Path | None:
    """`give_back` for a run that was killed before it could.

    Returns where its files are; None where there is nothing to do. Raises SpecError when a process writes into `path`.
    """
    if _displaced(path) is None:
        return None
    lock = _lock(path, wait_s)
    try:
        earlier, aside = _displaced(path), aside_of(path)
        if earlier is None or aside is None:  # it has done so itself
            return None
        _swap(path, aside, earlier)
        return aside
    finally:
        if lock is not None:
            lock.close()


def _displaced(path: Path) -> Path | None:
    """The run with checkpoints that the run in the folder `path`, which did no step, was given the place of."""
    marker = path / _EARLIER
    if not marker.is_file() or (path / METRICS).exists() or list_checkpoints(path / "checkpoints"):
        return None
    earlier = path.with_name(marker.read_text())
    return earlier if list_checkpoints(earlier / "checkpoints") else None


def _swap(path: Path, aside: Path, earlier: Path) -> None:
    path.rename(aside)
    earlier.rename(path)
    (aside / _EARLIER).unlink(missing_ok=True)


def aside_of(path: Path) -> Path | None:
    """Where the run in the folder `path` would be moved; None where there is none."""
    if not path.is_dir() or all(entry.name == _LOCK for entry in path.iterdir()):
        return None
    stamp = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}-{stamp}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}-{stamp}-{count}")
    return aside


def _remove_partial(path: Path) -> None:
    for left in (*path.glob(f"*{PARTIAL}"), *(path / "checkpoints").glob(f"*{PARTIAL}")):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Writes the file whole or, after a crash, not at all."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_bytes(content)
    partial.replace(path)


def _write_whole(file: int, content: bytes) -> None:
    """Appends all or, on a full disk, nothing: a part of a line would spoil the next one."""
    size = os.fstat(file).st_size
    try:
        while content:
            content = content[os.write(file, content) :]
    except OSError:
        os.ftruncate(file, size)
        raise


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints in ascending order; a partly written one still has its temporary name."""
    if not folder.is_dir():
        return []
    matches = [(match, path) for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in matches)


def command_to_go_on(path: Path) -> str:
    """With which a person has the run in the folder `path` go on that was ended: of a queue's job the queue's own."""
    with contextlib.suppress(OSError):
        return f"`rlix requeue {(path.parent / QUEUED).read_text().strip()}`"
    return "`rlix run --resume`"


def how_to_go_on(path: Path) -> str:
    """What a person does next whose run in the folder `path` was ended."""
    if not (done := list_checkpoints(path / "checkpoints")):
        return "it has no checkpoint to go on from"
    return f"{command_to_go_on(path)} goes on from its newest checkpoint, after step {done[-1][0]}"


def checkpoints_of(run_dir: Path) -> list[Checkpoint]:
    """Those of a run that a user named, in ascending order.

    Raises:
        SpecError: there is no such folder, or it has none.
    """
    if not run_dir.is_dir():
        raise SpecError(f"{run_dir}: there is no such folder; give a run folder, such as runs/<name>")
    if not (found := list_checkpoints(run_dir / "checkpoints")):
        raise SpecError(f"{run_dir}: has no checkpoint; give a run folder, such as runs/<name>")
    return found


def moved_aside(path: Path) -> list[Path]:
    """Runs of the same name that were moved aside, the one last moved first."""
    name = re.compile(re.escape(path.name) + _ASIDE)
    found = [folder for folder in path.parent.glob(f"{glob.escape(path.name)}-*") if name.fullmatch(folder.name)]
    return sorted(found, reverse=True)


def earlier_runs(path: Path) -> list[Path]:
    """Of those, the ones that have checkpoints."""
    return [folder for folder in moved_aside(path) if list_checkpoints(folder / "checkpoints")]


def newest_checkpoint(path: Path) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest checkpoint of a run folder that is whole, and the newer ones with what they have lost.

    Raises:
        SpecError: there are some, and none is whole.
    """
    broken: list[tuple[Path, str]] = []
    for step, checkpoint in reversed(list_checkpoints(path / "checkpoints")):
        if (what := damage(checkpoint)) is None:
            return (step, checkpoint), broken
        broken.append((checkpoint, what))
    if broken:
        found = "; ".join(f"{checkpoint.name}: {what}" for checkpoint, what in broken)
        raise SpecError(f"{path}: no checkpoint is whole ({found}); run without --resume to start anew")
    return None, []


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _step_of(row: bytes) -> int:
    return int(json.loads(row)["step"])
