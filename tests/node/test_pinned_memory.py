import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlix.node.pinned_memory import PinnedMemory, memory_bytes

MACHINE = int(psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("groups", "file", "said", "found"),
    [
        ("0::/jobs/mine", "jobs/memory.max", "4096", 4096),  # of a group around it
        ("0::/jobs/mine", "memory.max", "4096", 4096),  # in a container, whose own group is the root
        ("0::/jobs/mine", "jobs/mine/memory.max", "max", MACHINE),
        ("4:memory:/mine\n0::/", "memory/mine/memory.limit_in_bytes", "4096", 4096),
        ("4:cpu,memory:/mine", "memory/memory.limit_in_bytes", "9223372036854771712", MACHINE),
        ("", "memory.max", "4096", MACHINE),
    ],
)
def test_a_control_group_bounds_the_machines_memory(
    groups: str, file: str, said: str, found: int, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f"{said}\n")
    assert memory_bytes(groups, tmp_path) == found


def test_what_is_pinned_is_counted_over_processes_that_live(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from rlix.node.pinned_memory import PinnedMemory
mine = PinnedMemory(1000, Path({str(tmp_path)!r}))
print(mine.take(600), flush=True)
sys.stdin.read()
"""
    here = PinnedMemory(1000, tmp_path)
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert (here.take(500), here.take(400), here.take(500)) == (False, True, False)
    finally:
        other.kill()
        other.communicate(timeout=300)
    assert here.take(1000)
    here.give_back()
    assert here.take(1)
