"""One lock per device of this machine, which the kernel drops when the last process that holds it ends.

A device's lock is a file, and what is locked are bytes of it, by *open file description* (`F_OFD_SETLK`): such a lock
belongs to the open file, so forked children hold it too, also after their parent; unlike with `flock`, changing it from
exclusive to shared is atomic, and asking who holds it (`F_OFD_GETLK`) does not take part.

- Byte 0 is shared by those whose bytes are on the device, all under one fence. Whoever brings another fence needs it
  alone for a moment, and writes the record meanwhile: what is read while holding it is therefore true.
- Far beyond the record each holder shares a byte whose *number* is its process and start time, so that who holds the
  device is read from the kernel. It is taken last: until then there are no bytes on the device.

The record (a checksum and one JSON object) says for whom, since when, and the newest epochs of the pools that used the
device lately.
"""

import fcntl
import json
import os
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rlix.node import process
from rlix.node.own_folder import in_folder
from rlix.protocol.errors import DeviceBusyError, RlixError, StaleEpochError
from rlix.protocol.messages import Fence, Process

DIRECTORY = "/tmp/rlix-devices"  # every user of the machine shares it
DIRECTORY_VARIABLE = "RLIX_LOCK_DIR"

_RECORD_BYTES = 4096  # always written whole, by one call, so that a kill does not tear it
_POOLS = 16  # whose newest epochs a device remembers
_NAME_LENGTH = 200  # of a pool; what is for people is cut to it
_HOLDERS = 1 << 62  # the first byte that stands for a holder
_PID_BITS = 22  # the kernel's PID_MAX_LIMIT
_END = (1 << 63) - 1
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_HAND_OVER_S = 1.0  # more than asked for, when nobody is seen to hold the device but it is locked for an instant
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class LockRecord:
    """Who has bytes on a device, since when (unix seconds). An unreadable record leaves the fence's names empty.

    `processes`: those that took the lock and live; when none of them does, those seen to have inherited it.
    """

    key: str
    fence: Fence
    since: float
    processes: tuple[Process, ...]

    def __str__(self) -> str:
        who = ", ".join(f"pid {p.pid}{_if_stopped(p)}" for p in self.processes) or "a process that cannot be seen"
        phase = f" ({self.fence.phase})" if self.fence.phase else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since)) if self.since else "an unknown time"
        return f"{who} of job {self.fence.job or 'unknown'}{phase} since {since}"


class DeviceLocks:
    """The locks of devices that one user in this process needs together: all are held, or none.

    Any number of these, in any processes, hold a device at the same time under one fence (one pool and epoch). Not
    thread-safe. A forked child holds what its parent held; a `release` in either is one for both.

    Args:
        keys: of the devices (`Device.key`).
        directory: of the lock files; default: `RLIX_LOCK_DIR`, else `/tmp/rlix-devices`.
    """

    def __init__(
        self, keys: Sequence[str], directory: Path | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.keys = tuple(sorted(set(keys)))
        self.fence: Fence | None = None
        self._clock = clock
        folder = directory or lock_directory()
        # In one order everywhere, or two that want the same two would wait for each other.
        self._files = [_LockFile(folder, key) for key in self.keys]

    def acquire(self, fence: Fence, timeout_s: float) -> None:
        """Hold every device under `fence`; what is held under another one changes to it without being let go.

        Raises:
            StaleEpochError: a device has been used under a later epoch of this pool.
            DeviceBusyError: somebody else had a device for `timeout_s`; the message says who. Either way what was
                held before still is.
        """
        if fence == self.fence:
            return
        if len(fence.pool) > _NAME_LENGTH:
            raise ValueError(f"pool name of {len(fence.pool)} characters: at most {_NAME_LENGTH}")
        deadline = time.monotonic() + timeout_s
        try:
            for file in self._files:
                _await(file, fence, deadline, timeout_s)
            for file in self._files:
                file.settle(fence, self._clock())
        except BaseException:  # raised again
            for file in self._files:
                file.release() if self.fence is None else file.restore()
            raise
        self.fence = fence

    def release(self, keys: Collection[str] | None = None) -> None:
        """Let go of every device, or for good of these, after the last byte has gone. Nothing held: nothing done."""
        for file in self._files:
            if keys is None or file.key in keys:
                file.release()
        if keys is None:
            self.fence = None
        else:
            self._files = [file for file in self._files if file.key not in keys]
            self.keys = tuple(file.key for file in self._files)


class _LockFile:
    """One device's lock. To change hands `take` it until that is granted, then `settle`, or `restore` it."""

    def __init__(self, directory: Path, key: str) -> None:
        self.directory, self.key = directory, key
        self._path = lock_path(directory, key)
        self._fd: int | None = None
        self._alone = False  # byte 0 is ours alone
        self._settled = False  # held, under the fence in the record

    def take(self, fence: Fence) -> bool:
        """Get byte 0 alone, or share it with holders under the same fence. Raises StaleEpochError."""
        if self._fd is None:
            self._fd = _open(self.directory, self._path)
        self._alone = _lock(self._fd, fcntl.F_WRLCK)
        content = _read(self._fd)
        newest = dict(content.newest).get(fence.pool, 0)
        if fence.epoch < newest:
            raise StaleEpochError(
                f"device {self.key} refused to {fence.job or 'a process'} under epoch {fence.epoch}: "
                f"it has been used under epoch {newest} of pool {fence.pool!r} since"
            )
        if not self._alone and not (_same(content, fence) and self._join(fence)):
            return False
        if self._settled or _is_at(self._fd, self._path):
            return True
        self.release()  # the file was cleaned up between our opening and our locking it
        return False

    def _join(self, fence: Fence) -> bool:
        """Share byte 0 with those who hold it, if they still do so under this fence now that it cannot change."""
        assert self._fd is not None
        if self._settled:
            return True
        if not _lock(self._fd, fcntl.F_RDLCK):
            return False
        if _same(_read(self._fd), fence):
            return True
        _lock(self._fd, fcntl.F_UNLCK)
        return False

    def settle(self, fence: Fence, now: float) -> None:
        assert self._fd is not None
        if self._alone:
            _write(self._fd, _read(self._fd).used_by(fence, now))
        me = process.this_process()
        _lock(self._fd, fcntl.F_RDLCK, _HOLDERS + (me.started << _PID_BITS) + me.pid)
        self._settled = True
        self.restore()

    def restore(self) -> None:
        """Share what is held, under the fence in the record."""
        assert self._fd is not None
        if self._alone:
            _lock(self._fd, fcntl.F_RDLCK)
        self._alone = False

    def release(self) -> None:
        if self._fd is not None:
            _lock(self._fd, fcntl.F_UNLCK, 0, 0)  # closing would leave it to children that have the file open too
            os.close(self._fd)
        self._fd, self._alone, self._settled = None, False, False


@dataclass(frozen=True, slots=True)
class _Content:
    """What a lock's file says: the fence that has it or had it last, and pools' newest epochs, latest user last."""

    fence: Fence
    since: float
    newest: tuple[tuple[str, int], ...] = ()

    def used_by(self, fence: Fence, now: float) -> "_Content":
        newest = [entry for entry in self.newest if entry[0] != fence.pool]
        if fence.epoch > 0:  # 0 is nobody's lease: there is nothing older to refuse
            newest.append((fence.pool, fence.epoch))
        return _Content(fence, now, tuple(newest[-_POOLS:]))


_UNKNOWN = _Content(Fence("", -1), 0.0)


def lock_directory() -> Path:
    return Path(os.environ.get(DIRECTORY_VARIABLE) or DIRECTORY)


def lock_path(directory: Path, key: str) -> Path:
    return directory / f"{key.replace('/', '_')}.lock"


def holder(key: str, directory: Path | None = None, node_id: str = "") -> LockRecord | None:
    """Who has bytes on a device now; None: nobody. Disturbs nobody who asks for the lock at the same time."""
    if (fd := _open_to_read(lock_path(directory or lock_directory(), key))) is None:
        return None
    try:
        found = _holders(fd)
        for _ in range(_ATTEMPTS):
            if not found:
                return None
            content, before = _read(fd), found
            found = _holders(fd)
            if found == before and _read(fd) == content:
                break
        recorded = (Process(node_id, pid, started, content.fence.job) for pid, started in sorted(found))
        lock = os.fstat(fd)
        living = tuple(p for p in recorded if process.alive(p) and _may_have(p.pid, lock))
        return LockRecord(key, content.fence, content.since, living or _inheritors(lock, node_id))
    finally:
        os.close(fd)


def newest_epoch(key: str, pool: str, directory: Path | None = None) -> int:
    """The newest epoch under which a pool has used a device, as far as the device remembers; 0: under none."""
    if (fd := _open_to_read(lock_path(directory or lock_directory(), key))) is None:
        return 0
    try:
        read = (_read(fd) for _ in range(_ATTEMPTS))  # it may be being written
        return dict(next((content for content in read if content != _UNKNOWN), _UNKNOWN).newest).get(pool, 0)
    finally:
        os.close(fd)


def remove_unheld(prefix: str, directory: Path | None = None, *, older_than_s: float = 0.0) -> int:
    """Remove the lock files of devices that nobody holds, whose keys begin with `prefix`; returns how many.

    With a file go the epochs it remembers, so this is for devices that are gone. `older_than_s`: unused for so long.
    """
    removed = 0
    for path in (directory or lock_directory()).glob(f"{prefix}*.lock"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone, or another user's that may not be touched
            continue
        try:
            old = time.time() - os.fstat(fd).st_mtime >= older_than_s
            if old and _lock(fd, fcntl.F_WRLCK) and _is_at(fd, path):
                path.unlink()
                removed += 1
        except PermissionError:  # only its owner may remove it
            continue
        finally:
            os.close(fd)
    return removed


def _await(file: _LockFile, fence: Fence, deadline: float, timeout_s: float) -> None:
    pause = _FIRST_PAUSE_S
    while not file.take(fence):
        late = time.monotonic() - deadline
        now = holder(file.key, file.directory) if late >= 0 else None
        if now is not None or late >= _HAND_OVER_S:
            raise DeviceBusyError(
                f"device {file.key} is in use by {now or 'processes that take turns'}; "
                f"{fence.job or 'a process'} waited {timeout_s:g} s for it: use another device, or end the other job"
            )
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE_S, pause * 2)


def _open_to_read(path: Path) -> int | None:
    with _in(path.parent):
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None


def _open(directory: Path, path: Path) -> int:
    """Open or create a lock file, for every user of the machine."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(_ATTEMPTS):
        with _in(directory):
            try:
                # Not O_CREAT: in a sticky folder the kernel refuses it on other users' files (fs.protected_regular).
                return os.open(path, flags)
            except FileNotFoundError:
                _make_directory(directory)
            try:
                fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            os.fchmod(fd, 0o666)  # whatever the umask
            return fd
    raise RlixError(f"{path} comes and goes: what removes lock files there?")


def check_directory(directory: Path | None = None) -> None:
    """Makes the folder of the locks, and tries to write there. Raises SpecError when that cannot be done."""
    folder = directory or lock_directory()
    with _in(folder):
        _make_directory(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _in(directory: Path) -> AbstractContextManager[None]:
    return in_folder(DIRECTORY_VARIABLE, directory, "a folder that every user of this machine may write into")


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        if not stat.S_ISDIR(directory.lstat().st_mode):
            raise
        return
    directory.chmod(0o1777)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _lock(fd: int, kind: int, start: int = 0, length: int = 1) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except BlockingIOError:
        return False
    return True


def _locked(fd: int, start: int, length: int) -> int | None:
    """The number of a byte in this range that somebody else locks; None: nobody does."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    kind, _, found, _, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else int(found)


def _holders(fd: int) -> set[tuple[int, int]]:
    """Pid and start time of each process that took the lock, whether it lives or only what it forked."""
    holders = set()
    ranges = [(_HOLDERS, _END)]
    while ranges:
        start, end = ranges.pop()
        found = _locked(fd, start, end - start) if start < end else None
        if found is not None:
            number = found - _HOLDERS
            holders.add((number & ((1 << _PID_BITS) - 1), number >> _PID_BITS))
            ranges += [(start, found), (found + 1, end)]
    return holders


def _inheritors(lock: os.stat_result, node_id: str) -> tuple[Process, ...]:
    """Processes, of those this user may look into, that have this file open and locked."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if _has(int(folder.name), lock):
                found.append(process.describe(int(folder.name), node_id))
        except OSError:  # another user's process, or gone
            continue
    return tuple(p for p in found if p is not None)


def _may_have(pid: int, lock: os.stat_result) -> bool:
    """Whether a process has the lock, as far as this user may know: anybody can lock the byte that stands for it."""
    try:
        return _has(pid, lock)
    except PermissionError:
        return True
    except OSError:
        return False


def _has(pid: int, lock: os.stat_result) -> bool:
    """Whether a process has this file open and locked. Raises OSError for another user's, and one that is gone."""
    folder = process.folder(pid)
    for link in (folder / "fd").iterdir():
        try:
            if os.path.samestat(link.stat(), lock) and "OFDLCK" in (folder / "fdinfo" / link.name).read_text():
                return True
        except FileNotFoundError:  # closed meanwhile
            continue
    return False


def _read(fd: int) -> _Content:
    """Anyone may have written anything: what makes no sense is an unknown user."""
    try:
        checksum, text = os.pread(fd, _RECORD_BYTES, 0).rstrip().split(b" ", 1)
        if int(checksum, 16) != zlib.crc32(text):  # read while it was being written
            return _UNKNOWN
        value = json.loads(text)
        fence = Fence(str(value["pool"]), int(value["epoch"]), str(value["job"]), str(value["phase"]))
        newest = tuple((str(pool), int(epoch)) for pool, epoch in value["newest"])
        return _Content(fence, float(value["since"]), newest)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return _UNKNOWN


def _write(fd: int, content: _Content) -> None:
    newest = list(content.newest)
    fence = content.fence
    record = {
        "pool": fence.pool,
        "epoch": fence.epoch,
        "job": fence.job[:_NAME_LENGTH],
        "phase": fence.phase[:_NAME_LENGTH],
        "since": content.since,
        "newest": newest,
    }
    while len(text := json.dumps(record, ensure_ascii=False).encode(errors="replace")) > _RECORD_BYTES - 9:
        del newest[0]
    os.pwrite(fd, (b"%08x " % zlib.crc32(text) + text).ljust(_RECORD_BYTES), 0)


def _same(content: _Content, fence: Fence) -> bool:
    return (content.fence.pool, content.fence.epoch) == (fence.pool, fence.epoch)


def _if_stopped(p: Process) -> str:
    return " (stopped)" if process.state(p) == "stopped" else ""
