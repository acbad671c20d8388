"""How the daemon of an RLIX_HOME is found: a file that says where it is, and a lock that says whether it lives."""

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlix.control.home import check_folders, in_home
from rlix.node.addresses import host_name
from rlix.node.shared_folder import on_network
from rlix.protocol.errors import RlixError, WaitTimeoutError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
_LOOK_S = 1.0
_POLL_S = 0.05
_CLAIM_TRIES = 20
_LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a daemon's control plane is. `address`: of its Ray; `started`: unix seconds; `idle_s`: see `Settings`.

    `token_path` is the file with the token that its Ray wants, None where it wants none.
    """

    address: str
    pid: int
    started: float
    devices: int
    kind: str
    idle_s: float
    token_path: str | None

    @property
    def pool(self) -> str:
        """ "4 virtual GPUs"."""
        return pool_text(self.devices, virtual=self.kind == "cpu")


def pool_text(devices: int, *, virtual: bool) -> str:
    """ "4 virtual GPUs", "1 GPU"."""
    return f"{devices} {'virtual ' if virtual else ''}GPU{'' if devices == 1 else 's'}"


def check_owner(home: Path) -> None:
    """A home that several hosts see is one host's at a time: a daemon can be joined on its own host only.

    Raises:
        RlixError: it is another host's; names it. Where locks may not reach over the network, a daemon that was killed
            there counts as one that runs.
    """
    with in_home(home):
        try:
            owner = _lock(home).read_text()
        except FileNotFoundError:
            return
    if owner in ("", host_name()) or not (is_claimed(home) or on_network(home)):
        return
    raise RlixError(
        f"RLIX_HOME {home} is that of a control plane on host {owner}, which only commands on that host can join: give "
        f"the command there, or set RLIX_HOME to a folder on a disk of this host ({host_name()}). If none runs on "
        f"{owner} any more, delete {_lock(home)}"
    )


def read_announcement(home: Path) -> Announcement | None:
    """The announcement of the daemon that runs with this home; None where there is none, or none that is ready.

    Raises SpecError when the home cannot be looked into, or only another user may join its daemon; what `check_owner`
    raises.
    """
    check_owner(home)
    if not is_claimed(home):
        return None
    with in_home(home):
        try:
            found = Announcement(**json.loads(_file(home).read_text()))
        except (FileNotFoundError, ValueError, TypeError):  # starting, ending, or of another version
            return None
        if found.token_path is not None:
            with contextlib.suppress(FileNotFoundError):  # it is ending
                Path(found.token_path).open("rb").close()
    return found


def is_claimed(home: Path) -> bool:
    """Whether a daemon lives that has this home, ready or not. Raises SpecError when the home cannot be looked into."""
    with in_home(home):
        try:
            lock = _lock(home).open("r")
        except FileNotFoundError:
            return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Claim:
    """The right to be the daemon of a home. The kernel takes it back when the last process that holds it ends.

    Its descriptor is no Python file, which Python would close while the process still has seconds of tidying to do:
    whoever finds a home unclaimed may rely on the daemon's being gone.
    """

    def __init__(self, home: Path, inherited: int | None = None) -> None:
        """`inherited`: the descriptor with which whoever started this process passes its claim on."""
        self._home = home
        home.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(_lock(home), os.O_WRONLY | os.O_CREAT, 0o644) if inherited is None else inherited
        os.set_inheritable(self.descriptor, False)

    def take(self) -> bool:
        """False when another process has it. Raises what `check_owner` raises."""
        check_owner(self._home)
        for _ in range(_CLAIM_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.disown()
                os.pwrite(self.descriptor, host_name().encode(), 0)
                self.withdraw()  # what a daemon that was killed has left
                return True
            time.sleep(_POLL_S)  # somebody may just be looking, as `is_claimed` does
        return False

    def announce(self, announcement: Announcement) -> None:
        partial = _file(self._home).with_suffix(".partial")
        partial.write_text(json.dumps(asdict(announcement), indent=2))
        partial.rename(_file(self._home))

    def withdraw(self) -> None:
        """Nobody new comes; those who are attached stay."""
        _file(self._home).unlink(missing_ok=True)

    def disown(self) -> None:
        """The home is no host's: a daemon of any may have it next."""
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Gives the right back, if it was taken and not passed on."""
        os.close(self.descriptor)


def note_end(home: Path, found: Announcement, why: str) -> None:
    """For whoever is connected to this daemon: who ends it, as in "ended by `rlix down`"."""
    with in_home(home):
        _end_file(home).write_text(json.dumps({"pid": found.pid, "started": found.started, "why": why}))


def how_gone(home: Path, found: Announcement) -> str:
    """How a daemon ended that is not there any more: as `note_end` was told, or that it died."""
    with contextlib.suppress(OSError, ValueError):
        noted = json.loads(_end_file(home).read_text())
        if (noted.get("pid"), noted.get("started")) == (found.pid, found.started):
            return f"was {noted['why']}"
    return "died"


class DeathNotice:
    """Says at once that a daemon is gone: Ray notices almost a minute later, and whoever asks it something waits so
    long."""

    def __init__(self, home: Path, found: Announcement) -> None:
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._watch, args=(home, found), name="death notice", daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        self._over.set()

    def _watch(self, home: Path, found: Announcement) -> None:
        while is_claimed(home):
            if self._over.wait(_LOOK_S):
                return
        if not self._over.is_set():
            text = "the control plane (process %d) %s, and its Ray with it; what is asked of it fails within a minute"
            logger.warning(text, found.pid, how_gone(home, found))


def find_or_start_daemon(
    home: Path, virtual_gpus: int | None, *, timeout_s: float = START_TIMEOUT_S
) -> tuple[Announcement, bool]:
    """The announcement of the home's daemon, which is started where none runs, and whether this call started it.

    Who is interrupted meanwhile, by Ctrl-C, leaves none behind that is only starting.

    Raises:
        SpecError: none runs, and none can with this home.
        RlixError: it could not start; the message has the end of its log.
        WaitTimeoutError: it was not ready within `timeout_s` seconds.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        return _find_or_start(home, virtual_gpus, timeout_s, started)
    except RlixError:
        raise
    except BaseException:  # raised again
        for child in started:
            child.terminate()
        raise


def _find_or_start(
    home: Path, virtual_gpus: int | None, timeout_s: float, started: "list[subprocess.Popen[bytes]]"
) -> tuple[Announcement, bool]:
    deadline = time.monotonic() + timeout_s
    while True:
        found, child = read_announcement(home), started[-1] if started else None
        if found is not None:
            return found, child is not None and child.pid == found.pid
        if child is not None and child.poll():
            raise RlixError(f"the control plane did not start: {_end_of(log_path(home))}")
        if (child is None or child.returncode is not None) and not is_claimed(home):
            started += filter(None, [_spawn(home, virtual_gpus)])
        if time.monotonic() > deadline:
            raise WaitTimeoutError(_not_ready(home, timeout_s))
        time.sleep(_POLL_S)


def await_start(home: Path, timeout_s: float = START_TIMEOUT_S) -> Announcement | None:
    """The announcement of the home's daemon once it is ready, where one is starting; None when none is (any more).

    Raises:
        WaitTimeoutError: it was not ready within `timeout_s` seconds.
    """
    if not _wait(lambda: read_announcement(home) is not None or not is_claimed(home), timeout_s):
        raise WaitTimeoutError(_not_ready(home, timeout_s))
    return read_announcement(home)


def await_end(home: Path, timeout_s: float) -> None:
    """Returns when no daemon has this home any more.

    Raises:
        WaitTimeoutError: one still has it after `timeout_s` seconds.
    """
    if not _wait(lambda: not is_claimed(home), timeout_s):
        raise WaitTimeoutError(f"the control plane in {home} did not end within {timeout_s:.0f} s")


def log_path(home: Path) -> Path:
    """What the daemon and its Ray write."""
    return home / "logs" / "daemon.log"


def python_path() -> list[str]:
    """The folders of PYTHONPATH as this process means them; another one may have another working directory."""
    return [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _not_ready(home: Path, timeout_s: float) -> str:
    return f"no control plane was ready within {timeout_s:.0f} s in {home}; its log is {log_path(home)}"


def _spawn(home: Path, virtual_gpus: int | None) -> "subprocess.Popen[bytes] | None":
    """Starts a daemon that has the home's claim from the first moment; None when somebody else has it."""
    check_folders(home)
    log = log_path(home)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RLIX_HOME"] = str(home)
    environment["PYTHONPATH"] = os.pathsep.join(python_path())
    size = [] if virtual_gpus is None else [str(virtual_gpus)]
    with contextlib.ExitStack() as opened:
        with in_home(home):
            log.parent.mkdir(exist_ok=True)
            output = opened.enter_context(log.open("ab"))
            claim = opened.enter_context(contextlib.closing(Claim(home)))
            if not claim.take():
                return None
        return subprocess.Popen(
            [sys.executable, "-m", "rlix.control.daemon", *size, f"--claim={claim.descriptor}"],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[claim.descriptor],
            start_new_session=True,
        )


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(["see " + str(log), *lines[-_LOG_LINES:]])


def _wait(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _file(home: Path) -> Path:
    return home / "daemon.json"


def _end_file(home: Path) -> Path:
    return home / "ended.json"


def _lock(home: Path) -> Path:
    return home / "daemon.lock"
