"""How a command ends that cannot do what it should: one message, no traceback."""

import sys
from types import TracebackType
from typing import Self

import typer
from rich.markup import escape

from rlix.cli.view import make_console
from rlix.protocol.errors import RlixError, SpecError

EXIT_FAILED = 1
EXIT_USAGE = 2


class one_message_per_mistake:  # noqa: N801 - used as a function
    """Turn RLix's own errors, and Ray's, into one message on stderr and an exit code."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        found = None if error is None else _known(error)
        if found is None:
            return
        make_console(stderr=True).print(f"[bold red]rlix:[/] {escape(str(found))}", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_USAGE if isinstance(found, SpecError) else EXIT_FAILED) from None


def _known(error: BaseException) -> RlixError | None:
    """What to say of an error; None of one that is a defect of ours."""
    if "ray" in sys.modules:  # who has not loaded it does so for seconds, and has none of its errors
        from ray.exceptions import RayError, RayTaskError

        from rlix.control.rpc import in_words, root_cause

        if isinstance(error, RayTaskError):
            error = root_cause(error)
        if isinstance(error, RayError):
            return RlixError(f"{in_words(error)}; try again in a moment, `rlix down` ends whatever is left")
    return error if isinstance(error, RlixError) else None
