"""How the user's mistakes end a command: one message, no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.markup import escape

from rlix.cli.view import make_console
from rlix.protocol.errors import RlixError, SpecError

EXIT_FAILED = 1
EXIT_USAGE = 2


@contextmanager
def one_message_per_mistake() -> Iterator[None]:
    """Turn RLix's own errors into one message on stderr and an exit code."""
    try:
        yield
    except RlixError as error:
        make_console(stderr=True).print(f"[bold red]rlix:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_USAGE if isinstance(error, SpecError) else EXIT_FAILED) from None
