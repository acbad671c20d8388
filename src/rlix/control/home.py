"""RLIX_HOME as a folder that a control plane can live in; where it cannot, one sentence says why and what to do."""

import errno
import pwd
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlix.protocol.errors import SpecError

_FIRST_BYTES = 2**20  # more than a control plane writes before its first job
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM)


def check_home(home: Path) -> None:
    """Makes the folder, and tries to write there. Raises SpecError when that cannot be done."""
    with in_home(home):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(bytes(_FIRST_BYTES))


@contextmanager
def in_home(home: Path) -> Iterator[None]:
    """Around what reads or writes there. Raises SpecError for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise SpecError(_sentence(home, error)) from error


def _sentence(home: Path, error: OSError) -> str:
    if error.errno in _FULL:
        return f"the disk of RLIX_HOME, {home}, is full: free some space there, or set RLIX_HOME to another folder"
    owner = f"; {_owner(home)}" if error.errno in _FORBIDDEN else ""
    what = (
        "it is no folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror or str(error)
    )
    return f"RLIX_HOME, {home}, cannot be used ({what}{owner}): set RLIX_HOME to a folder of yours, on a local disk"


def _owner(home: Path) -> str:
    """Whose the folder is, or the one in which it would be."""
    there = next((folder for folder in (home, *home.parents) if _is_there(folder)), Path("/"))
    number = there.stat().st_uid
    try:
        name = pwd.getpwuid(number).pw_name
    except KeyError:
        name = str(number)
    return f"{there} is {name}'s"


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:  # in a folder that may not be looked into
        return False
