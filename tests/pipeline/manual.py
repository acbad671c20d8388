"""The programs that the manual shows."""

import re
from pathlib import Path

MANUAL = Path(__file__).parents[2] / "docs" / "algorithms.md"


def manual_file(name: str, folder: Path) -> Path:
    """What the manual calls `name`.py, as a file in `folder`."""
    (code,) = re.findall(rf"```python\n(# {name}\.py.*?)```", MANUAL.read_text(), re.DOTALL)
    path = folder / f"{name}.py"
    path.write_text(code)
    return path
