"""The process behind `Panel`: calls rewards of the user's, as told by lines of JSON on its input."""

import contextlib
import ctypes
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import IO, Any, cast

from rlix.pipeline.sources.rewards import Reward, number
from rlix.pipeline.spec.named import import_object, own_traceback, where_raised
from rlix.protocol.errors import SpecError

_PR_SET_PDEATHSIG = 1


@cache
def _function(name: str) -> tuple[Callable[..., Any], Callable[[str], bool]]:
    """A reward, and whether it takes a column of some name."""
    function = cast(Callable[..., Any], import_object(name))
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin says nothing of what it takes
        return function, lambda _: False
    first, others = ({p.name for p in part} for part in (parameters[:3], parameters[3:]))
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function, lambda column: column not in first
    return function, lambda column: column in others


def call(request: Mapping[str, Any]) -> dict[str, Any]:
    function, takes = _function(request["function"])
    columns = {k: v for k, v in request["columns"].items() if takes(k)}
    value = function(*request["given"], **{**columns, **request["options"]})
    given, exact = (value.reward, bool(value.exact)) if isinstance(value, Reward) else (value, None)
    if (reward := number(given)) is None:
        raise TypeError(f"it returned {value!r}, which is no number")
    return {"reward": reward, "exact": exact}


def serve(functions: Sequence[str], requests: IO[str], answers: IO[str]) -> None:
    """Import the functions, say so, then answer until the input ends."""
    for name in functions:
        with contextlib.suppress(SpecError):  # said when it is called
            _function(name)
    answers.write("ready\n")
    answers.flush()
    for line in requests:
        try:
            reply = call(json.loads(line))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other side says it
            reply = {"error": where_raised(error), "trace": own_traceback(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def end_with(parent: int) -> None:
    """Be killed when the process that asks is gone, whatever the user's code does then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    private = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a reward prints must not get among the answers
    serve(sys.argv[2:], sys.stdin, private)
