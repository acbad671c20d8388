"""How commands end that cannot do what they should: one sentence, an exit code, no page of Ray's."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RaySystemError,
    RayTaskError,
    RpcError,
)

from rlix.cli.mistakes import one_message_per_mistake
from rlix.control.rpc import in_words
from rlix.protocol.errors import RlixError, SpecError

PAGE = """The actor died unexpectedly before finishing this task.
\tclass_name: PipelineActor
\tactor_id: a1bb71dd45c71f8506dfb47e06000000
\tpid: 15820
\tname: pipeline:ft_1
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: {kind} Worker exit detail: {detail}"""


def died(kind: str = "SYSTEM_ERROR", detail: str = "connection error code 2. End of file.") -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = PAGE.format(kind=kind, detail=detail)
    return error


def stillborn(error: Exception) -> ActorDiedError:
    """As Ray says that an actor's `__init__` raised: with colours, and a cause of the error."""
    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    raise KeyError(key)\n'
    page = f"{frames}KeyError: 'key'\n\nThe above was the cause:\n\n\x1b[36mray::X.__init__()\x1b[39m (pid=1)\n{frames}"
    return ActorDiedError(RayTaskError("__init__", f"{page}some.module.{type(error).__name__}: {error}", error))


def in_actor(cause: Exception) -> RayTaskError:
    return RayTaskError("status", "Traceback (most recent call last):\n" + "  a page\n" * 100, cause)


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (SpecError("no such job"), "rlix: no such job\n", 2),
        (in_actor(RlixError("the scheduler is away")), "rlix: the scheduler is away\n", 1),
        (in_actor(in_actor(SpecError("no such device"))).as_instanceof_cause(), "rlix: no such device\n", 2),
        (died(), "process 15820 (job ft_1) died: it was killed (by somebody, or by the kernel", 1),
        (stillborn(SpecError("job.yaml: no steps")), "rlix: SpecError: job.yaml: no steps; try again", 1),
        (died("NODE_OUT_OF_MEMORY"), "process 15820 (job ft_1) was killed: its node ran out of memory", 1),
        (ActorUnavailableError("connection reset", b"x" * 16), "cannot be reached just now", 1),
        (GetTimeoutError("Get timed out"), "the control plane did not answer in time", 1),
        (RaySystemError("line one\nline two"), "line one", 1),
        (RpcError("UNAVAILABLE: no route"), "no route", 1),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: BaseException, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as exited, one_message_per_mistake():
        raise error
    assert exited.value.exit_code == code
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), one_message_per_mistake():
        raise KeyError("oh")


def test_a_death_without_a_process_is_said_too() -> None:
    assert in_words(ActorDiedError()).startswith("a process died")
    assert in_words(RayError()) == "Ray: RayError"


SLOW = ("torch", "transformers", "ray", "numpy")
BAD_JOB = "name: job\nstepz: 3\n"
MISTAKES = [
    ("run", "nosuch.yaml"),
    ("run", "bad.yaml"),
    ("run", "--trl", "nosuch.py"),
    ("check", "bad.yaml"),
    ("submit", "bad.yaml"),
    ("export", "nosuch", "out"),
    ("report", "nosuch"),
    ("serve", "--tinker", "nosuch.yaml"),
    ("serve", "--tinker", "bad.yaml"),
    ("explain", "nosuch"),
    ("nosuch",),
    ("--help",),
]


def test_a_mistake_waits_for_no_library_that_takes_seconds_to_load(tmp_path: Path) -> None:
    """One process tells all of them, so that what one loads is seen at the first that does."""
    (tmp_path / "bad.yaml").write_text(BAD_JOB)
    code = f"""
import sys
from typer.testing import CliRunner
from rlix.cli.main import app
for arguments in {MISTAKES!r}:
    ended = CliRunner().invoke(app, list(arguments))
    loaded = sorted(set({SLOW!r}) & set(sys.modules))
    wrong = ended.exit_code != (0 if arguments == ("--help",) else 2) or loaded
    if wrong:
        sys.exit(f"{{arguments}}: {{ended.exit_code}}, loaded {{loaded}}: {{ended.output}}{{ended.exception!r}}")
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
