"""Runs a script in this process as `python script.py` does: its `__main__`, its tracebacks, its exit code."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


def set_command(argv: Sequence[str]) -> None:
    """The script and its arguments, and what it imports from."""
    sys.argv = list(argv)
    sys.path[0] = str(Path(argv[0]).resolve().parent)


def run_as_main(script: str, ended: Callable[[SystemExit], None] = lambda _: None) -> None:
    """After `set_command`. `ended` is told of a SystemExit, which is raised again.

    Raises:
        SystemExit: the script raised it, or something else, whose traceback is then on stderr.
    """
    path = Path(script).absolute()
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __cached__=None, __loader__=SourceFileLoader("__main__", str(path)))
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main  # to the end: what runs at exit may use it
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
    except SystemExit as end:
        ended(end)
        raise
    except BaseException as error:  # noqa: BLE001 - told as the interpreter does
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next
        error = error.with_traceback(trace)
        sys.excepthook(type(error), error, trace)
        raise SystemExit(1) from None
