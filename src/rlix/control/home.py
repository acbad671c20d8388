"""RLIX_HOME as a folder that a control plane can live in."""

import logging
import tempfile
from contextlib import AbstractContextManager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from rlix.node.device_lock import check_directory
from rlix.node.own_folder import in_folder
from rlix.node.plain import PlainFormatter

_FIRST_BYTES = 2**20  # more than a control plane writes before its first job


def check_folders(home: Path) -> None:
    """Makes what a control plane needs, the folder of the device locks, too, and tries to write there.

    Raises SpecError when that cannot be done.
    """
    with in_home(home):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(bytes(_FIRST_BYTES))
    check_directory()


def in_home(home: Path) -> AbstractContextManager[None]:
    """Around what reads or writes there. Raises SpecError for an OSError in the block."""
    return in_folder("RLIX_HOME", home, "a folder of yours, on a local disk")


def log_to(home: Path, name: str) -> None:
    """Besides, what is logged goes to a file of this name there."""
    path = home / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=5_000_000, backupCount=3)
    handler.setFormatter(PlainFormatter())
    logging.getLogger("rlix").addHandler(handler)
