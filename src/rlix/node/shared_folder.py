"""Whether two hosts mean the same folder by a path: one writes a word there that the other one must read."""

import secrets
import time
from pathlib import Path

import psutil

SEEN_WITHIN_S = 5.0
"""So long a network file system may go on saying what it knew of a folder before."""
_LOOK_EVERY_S = 0.1
_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "fuse", "9p", "virtiofs", "afs")


def on_network(folder: Path) -> bool:
    """Whether other hosts may have `folder`, too: it is not on a disk of this one."""
    path = folder.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    kind = max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""
    return kind.startswith(_NETWORK)


class Token:
    """A file in `folder`, which is made where it is missing, that nobody else can have made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.text = secrets.token_hex(16)
        self.path = folder / f".rlix-{self.text[:8]}"
        self.path.write_text(self.text)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def sees(path: Path, text: str, within_s: float = SEEN_WITHIN_S) -> bool:
    """Whether the token that another host has written at `path` is here."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if path.read_text() == text:
                return True
        except OSError:  # not there, or on a disk that is away
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
