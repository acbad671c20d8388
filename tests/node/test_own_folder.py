"""What is wrong with a folder is said of the folder, and nothing else is."""

import errno
import os
from pathlib import Path

import pytest

from rlix.node.own_folder import in_folder
from rlix.protocol.errors import SpecError


@pytest.mark.parametrize(("number", "said"), [(errno.EROFS, True), (errno.ENOSPC, True), (errno.EMFILE, False)])
def test_another_folder_is_advised_where_it_would_help(number: int, said: bool, tmp_path: Path) -> None:
    with (
        pytest.raises(SpecError if said else OSError, match=f"set MINE to|{os.strerror(number)}"),
        in_folder("MINE", tmp_path, "a folder of yours"),
    ):
        raise OSError(number, os.strerror(number))
