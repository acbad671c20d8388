"""The programs of examples/engines as a user would start them."""

from pathlib import Path

import torch

from benchmarks.gpu.common import Row
from benchmarks.gpu.pool import program, spent

LIMIT_S = 120.0
EXAMPLES = Path(__file__).parents[2] / "examples" / "engines"


def measure(device: torch.device) -> list[Row]:
    rows = []
    for path in sorted(EXAMPLES.glob("*.py")):
        seconds = spent(lambda path=path: print(program(str(path), limit_s=LIMIT_S)[-500:]))  # type: ignore[misc]
        rows.append(Row(f"{path.name} ended", seconds, "s", "limit", LIMIT_S, "< 1"))
    return rows
