"""What a job's code prints goes to a file that stays small, and what a person must see still reaches the terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlix.node.output import cut, has_more

PRINTS = """
import logging, os, pathlib, subprocess, sys, time
from rlix.node import output
path, mib = pathlib.Path(sys.argv[1]), int(sys.argv[2])
print("before")
assert output.file() is None
output.to_file(output.early_file(path.parent), bounded=True)
print("while it starts")
output.to_file(path, bounded=True, after=output.early_file(path.parent))
assert output.file() == path
print("from Python")
os.write(1, b"from C\\n")
subprocess.run(["sh", "-c", "echo from a child; echo and its errors >&2"], check=True)
print("what a person must see", file=output.terminal())
line = "x" * 1023
for _ in range(mib * 1024):
    print(line)
deadline = time.monotonic() + 300
cut = lambda text: len(text) <= output.LIMIT_BYTES and (not mib or b"bytes were printed" in text[output.KEPT_BYTES:])
while not cut(path.read_bytes()) and time.monotonic() < deadline:
    time.sleep(0.05)
print("the last", flush=True)
output.to_file(path.with_name("other"), bounded=False)
print("elsewhere", flush=True)
print("seen, too", file=output.terminal())
"""


@pytest.mark.parametrize("mib", [0, 40])
def test_everything_that_is_printed_is_in_a_file_of_bounded_size(tmp_path: Path, mib: int) -> None:
    path = tmp_path / "output.log"
    done = subprocess.run([sys.executable, "-c", PRINTS, path, str(mib)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "before\n"), done.stderr
    assert done.stderr == "what a person must see\nseen, too\n"
    text = path.read_text()
    assert text.startswith("while it starts\nfrom Python\nfrom C\nfrom a child\nand its errors\n")
    assert text.endswith("the last\n")
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))
    assert (tmp_path / "other").read_text() == "elsewhere\n"
    assert path.stat().st_size <= 16 * 2**20 + 100
    assert text.count("more than 16,777,216 bytes were printed") == (1 if mib else 0)


def test_lines_of_our_own_are_nothing_that_its_code_printed(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    assert not has_more(path)
    path.write_text("rlix: process 4711 is ended: my job\n\n")
    assert not has_more(path)
    path.write_text("rlix: process 4711 is ended: my job\nand mine\n")
    assert has_more(path)


def test_the_beginning_is_kept_and_whoever_writes_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    with path.open("ab+", buffering=0) as mine, path.open("ab", buffering=0) as others:
        others.write(b"0123456789")
        assert not cut(mine.fileno(), limit=10, kept=4)
        others.write(b"0")
        assert cut(mine.fileno(), limit=10, kept=4)
        others.write(b"after")
        text = path.read_bytes()
        assert text.startswith(b"0123\n[rlix: ")
        assert text.endswith(b"left out]\nafter")
        assert cut(mine.fileno(), limit=10, kept=4)  # again, with one note
        assert path.read_bytes().count(b"rlix") == 1
        os.ftruncate(mine.fileno(), 0)
        assert not cut(mine.fileno(), limit=10, kept=4)
