"""What survives a power cut: files are on disk before anybody counts on them."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return when the file, or the names in the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Return when everything in the folder is on disk, but for the folder's own name."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(folder)
