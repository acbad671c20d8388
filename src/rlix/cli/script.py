"""`rlix run --trl`: a TRL script as it is, as a job of the pool."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rlix.cli.view import make_console
from rlix.protocol.errors import SpecError


def run_script(command: Sequence[str], runs_dir: Path, devices: int | None) -> NoReturn:
    """Become the TRL script `command[0]`, as a job of the shared pool, with the rest as its arguments.

    Raises:
        SpecError: there is no such script, or its run folder could not be written.
    """
    if not Path(command[0]).is_file():
        raise SpecError(f"--trl: no such script: {command[0]}")
    check_output(runs_dir)
    environment = os.environ | {"RLIX_RUNS_DIR": str(runs_dir)}
    if devices is not None:
        environment["RLIX_VIRTUAL_GPUS"] = str(devices)
    make_console(stderr=True).print(f"loading TRL, to run {command[0]} as a job of the pool ...", highlight=False)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "rlix.trl", *command], environment)


def check_output(runs_dir: Path) -> None:
    """Raises SpecError: run folders cannot be written there."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise SpecError(f"--runs-dir {runs_dir}: is a file; choose a folder") from None
    except OSError as error:
        raise SpecError(
            f"--runs-dir {runs_dir}: cannot be created ({error.strerror}); choose another folder"
        ) from error
    if not os.access(runs_dir, os.W_OK):
        raise SpecError(f"--runs-dir {runs_dir}: not writable; choose another folder")
