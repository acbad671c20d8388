"""What a complete checkpoint consists of, so that one that lost something later is not gone on from."""

import json
from collections.abc import Iterable
from pathlib import Path

from rlix.node.addresses import host_name
from rlix.protocol.errors import RlixError

FILE = "manifest.json"
_STATE = "state.json"


def write_manifest(folder: Path, states: Iterable[Path] = ()) -> None:
    """Note the size of every file in `folder`.

    Raises:
        RlixError: the part of a rank is missing in one of the `states` of engines, which were saved there.
    """
    for state in states:
        if missing := _missing(state):
            raise RlixError(
                f"{', '.join(missing)} of {state} did not come to host {host_name()}: all hosts of a job must share "
                "its run folder; this checkpoint does not count"
            )
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    (folder / FILE).write_text(json.dumps({"files": sizes}, indent=1))


def _missing(state: Path) -> list[str]:
    """The files of an engine's saved state that are not there: a description, and something of every rank."""
    try:
        ranks = int(json.loads((state / _STATE).read_bytes())["world_size"])
    except FileNotFoundError:
        return [_STATE]
    return [name for name in (f"rng_{rank}.json" for rank in range(ranks)) if not (state / name).is_file()]


def damage(folder: Path) -> str | None:
    """What a checkpoint has lost: a file, or a part of one, or the note of what it had. None: nothing."""
    try:
        files: dict[str, int] = json.loads((folder / FILE).read_bytes())["files"]
    except FileNotFoundError:
        return f"{FILE} is missing"
    except (ValueError, KeyError, OSError) as error:
        return f"{FILE} cannot be read ({error})"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found:,} of {size:,} bytes"
    return None
