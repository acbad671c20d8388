"""How CI runs the suite (`.ci/tests`): a test that fails beside others may try once more, alone, and is named."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "tests"
SUITE = """
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

def first(name):
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def test_that_passes():
    with (HERE / "runs").open("a") as file:
        file.write(".")

@pytest.mark.parametrize("number", range(int(os.environ["FLAKY"])))
def test_that_fails_once(number):
    assert not first(f"flaky-{number}") and "PYTEST_XDIST_WORKER" not in os.environ

@pytest.mark.parametrize("number", range(int(os.environ["BROKEN"])))
def test_that_fails(number):
    assert False
"""


@pytest.mark.parametrize(
    ("flaky", "broken", "suite_s", "code", "said"),
    [
        (0, 0, 300, 0, ""),
        (2, 0, 300, 0, "FLAKY: failed beside others, passed alone:\ntest_suite.py::test_that_fails_once[0]\n"),
        (1, 1, 300, 1, "2 tests are tried again, alone:\n"),
        (4, 0, 300, 1, "4 tests failed; only up to 3 are tried again"),
        (1, 0, 0.001, 2, "session-timeout"),
    ],
)
def test_what_fails_twice_or_with_many_others_or_in_a_suite_that_did_not_end_fails(
    tmp_path: Path, flaky: int, broken: int, suite_s: float, code: int, said: str
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [SCRIPT, str(suite_s), "300", sys.executable, "-m", "pytest", "-n", "1"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "FLAKY": str(flaky), "BROKEN": str(broken)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert ("FLAKY:" in done.stdout) is (flaky > 0 and code == 0)
    assert (tmp_path / "runs").read_text() == ".", "only what failed runs again"
