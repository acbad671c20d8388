"""What a complete checkpoint consists of, so that one that lost something later is not gone on from."""

import json
from pathlib import Path

FILE = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Note the size of every file in `folder`."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    (folder / FILE).write_text(json.dumps({"files": sizes}, indent=1))


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
