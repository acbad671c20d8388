"""`rlix queue`: what whoever keeps the queue does with it as a whole."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlix.cli.mistakes import one_message_per_mistake
from rlix.cli.queue_commands import Json
from rlix.protocol.errors import RlixError

app = typer.Typer(help="The queue as a whole: drain it, back it up, restore it.", no_args_is_help=True)


class Event(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    STARVED = "starved"


@app.command()
def drain(
    requeue: Annotated[
        bool, typer.Option("--requeue", help="What runs writes a checkpoint, ends, and waits with the others.")
    ] = False,
    wait: Annotated[
        str | None, typer.Option(metavar="TIME", help="Return when nothing runs, after so long at most: 5m.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Let nothing start any more, also after a restart, until `rlix queue resume`. What runs goes on."""
    from rlix.cli import queue
    from rlix.serve.api.models import Draining

    with one_message_per_mistake():
        until = time.monotonic() + (0.0 if wait is None else queue.duration(wait, "--wait"))
        pool = queue.ask_pool("/v1/queue/drain", Draining(requeue=requeue))
        while pool.running and wait is not None:
            if time.monotonic() > until:
                raise RlixError(f"after {wait} {pool.running} jobs still run; `rlix ps` shows them")
            time.sleep(queue.POLL_S)
            pool = queue.ask_pool("/v1/pool", None)
        queue.say_pool(pool, as_json=as_json)


@app.command()
def resume(as_json: Json = False) -> None:
    """Let jobs start again."""
    from rlix.cli import queue
    from rlix.serve.api.models import Draining

    with one_message_per_mistake():
        queue.say_pool(queue.ask_pool("/v1/queue/resume", Draining()), as_json=as_json)


@app.command()
def hook(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="Is told by a POST; '' for nobody.")] = None,
    on: Annotated[list[Event] | None, typer.Option(help="Repeatable; all, if left out.")] = None,
    as_json: Json = False,
) -> None:
    """Be told of all your jobs, by a webhook; without a URL, say by whom. Prints the secret by which it knows us."""
    from rlix.cli import queue

    with one_message_per_mistake():
        queue.hook(url, on or (), as_json=as_json)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")], as_json: Json = False
) -> None:
    """Copy the queue of this RLIX_HOME (jobs, their files, accounts, users) into one file, also while it is served."""
    from rlix.cli.answers import FileAnswer, say
    from rlix.control.settings import Settings
    from rlix.serve.queue.backup import backup as write

    with one_message_per_mistake():
        write(Settings.from_env().home, file)
        say(FileAnswer(said=f"the queue as it is now: {file}", file=str(file)), as_json=as_json)


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="What `rlix queue backup` has written.")], as_json: Json = False
) -> None:
    """Put a backup in the place of the queue of this RLIX_HOME, while no `rlix serve` has that one, which is kept."""
    from rlix.cli.answers import FileAnswer, say
    from rlix.control.settings import Settings
    from rlix.serve.queue.backup import restore as put

    with one_message_per_mistake():
        done = put(Settings.from_env().home, file)
        kept = "" if done.aside is None else f"; the one before is kept as {done.aside}"
        drained = f"; drained by {done.drained}: nothing starts until `rlix queue resume`" if done.drained else ""
        file_kept = None if done.aside is None else str(done.aside)
        say(FileAnswer(said=f"restored{kept}{drained}", file=file_kept), as_json=as_json)
