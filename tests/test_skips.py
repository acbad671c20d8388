"""A test that does not run says nothing: only a GPU, a browser, or root, may be what a run lacks."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

SUITE = """
import pytest

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs an NVIDIA GPU")
def test_on_a_gpu(): ...

@pytest.fixture
def namespace():
    pytest.skip("needs root")

@pytest.mark.root
def test_with_namespaces(namespace): ...

@pytest.mark.xfail(reason="known", strict=True)
def test_a_limitation():
    assert False

def test_what_is_not_installed():
    pytest.importorskip("no_such_package")

@pytest.mark.skipif(True, reason="later")
def test_put_off(): ...
"""


def test_a_skip_for_anything_else_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(SUITE)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    settings = ["-c", str(REPOSITORY / "pyproject.toml"), "--rootdir", str(REPOSITORY)]
    command = [sys.executable, "-m", "pytest", *settings, "-p", "tests.skips", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "--continue-on-collection-errors", str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "1 failed, 2 skipped, 1 xfailed, 2 errors" in run.stdout, run.stdout
    assert "only ['browser', 'gpu', 'root'] may be missing" in run.stdout
