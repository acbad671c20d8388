"""A script that is run for its user behaves as under `python script.py`."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPTS = {
    "names": """
        import atexit, beside, pickle, sys
        class Mine: pass
        print(__name__, __file__, __spec__, __doc__, sys.argv, sys.path[0], beside.__name__)
        print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, sys.modules["__main__"].Mine is Mine)
        def last(): print("at exit", Mine.__name__)
        atexit.register(last)
    """,
    "raises": """
        def inner(): raise ValueError("no")
        try:
            inner()
        except ValueError as error:
            raise KeyError("key") from error
    """,
    "cannot be read": "print(1",
    "exits": "raise SystemExit(3)",
    "says why": "import sys; sys.exit('no data')",
    "raises in a library": "import json\njson.loads('{')",
}
AS_MAIN = """
import sys
from rlix.integrations.script import run_as_main, set_command
set_command(sys.argv[1:])
run_as_main(sys.argv[0])
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_says_and_returns_what_it_does_alone(script: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").touch()
    (tmp_path / "sub" / "my script.py").write_text(textwrap.dedent(SCRIPTS[script]))
    (tmp_path / "link.py").symlink_to("sub/my script.py")
    for name in ("sub/my script.py", "link.py"):
        alone, run = [
            subprocess.run([sys.executable, *how, name, "--steps", "3"], cwd=tmp_path, capture_output=True, check=False)
            for how in ((), ("-c", AS_MAIN))
        ]
        assert (run.returncode, run.stdout.decode(), run.stderr.decode()) == (
            alone.returncode, alone.stdout.decode(), alone.stderr.decode()
        )  # fmt: skip
