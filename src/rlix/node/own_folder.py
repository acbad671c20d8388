"""A folder that a variable of the environment names; where it cannot be used, one sentence says why and what to do."""

import errno
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlix.protocol.errors import SpecError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_OF_NO_FOLDER = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@contextmanager
def in_folder(variable: str, folder: Path, fitting: str) -> Iterator[None]:
    """Around what reads or writes there. Raises SpecError for an OSError, where another folder would help.

    Args:
        fitting: what folder the variable should name, as in "a folder of yours".
    """
    try:
        yield
    except OSError as error:
        if error.errno in _OF_NO_FOLDER:
            raise
        raise SpecError(_sentence(variable, folder, fitting, error)) from error


def _sentence(variable: str, folder: Path, fitting: str, error: OSError) -> str:
    if error.errno in _FULL:
        return f"the disk of {variable}, {folder}, is full: free some space there, or set {variable} to another folder"
    owner = f"; {_owner(folder)}" if error.errno in _FORBIDDEN else ""
    what = (
        "it is no folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror or str(error)
    )
    return f"{variable}, {folder}, cannot be used ({what}{owner}): set {variable} to {fitting}"


def _owner(folder: Path) -> str:
    """Whose the folder is, or the one in which it would be."""
    there = next((parent for parent in (folder, *folder.parents) if _is_there(parent)), Path("/"))
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
