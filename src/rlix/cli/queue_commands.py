"""The queue's commands: what they take."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlix.cli.mistakes import one_message_per_mistake
from rlix.cli.view import make_console
from rlix.protocol.errors import SpecError
from rlix.serve.addresses import PORT


def _number(text: str) -> int:
    if not (text.isdecimal() and len(text) <= _LONGEST_NUMBER):
        raise typer.BadParameter(f"{text} is no job's number: `rlix ps` and `rlix history` show them")
    return int(text)


_LONGEST_NUMBER = 17
Id = Annotated[int, typer.Argument(metavar="ID", parser=_number, help="A job's number, as `rlix submit` prints it.")]
Ids = Annotated[
    list[int], typer.Argument(metavar="ID...", parser=_number, help="Jobs' numbers, as `rlix submit` prints them.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; anything else goes to stderr.")]
Mine = Annotated[bool, typer.Option("--mine", help="Only jobs of yours.")]
Given = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="In place of the job file's: rollout.temperature=0.8; repeatable."),
]
Class = Literal["low", "normal", "high"]


def serve(
    runs_dir: Annotated[
        Path, typer.Option(help="Where run folders go, each in a folder with its job's number.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Listen at this address.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="And at this port (7459, of Tinker's API 8642); 0: any free one."),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="For https: the certificate, in PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="And its private key.")] = None,
    tinker: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Serve Tinker's API instead; FILE says which models are offered."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="With --tinker: use this many virtual GPUs (default: GPUs, or 8 virtual).")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --tinker: use a control plane that ends with the server.")
    ] = False,
) -> None:
    """Keep a queue in front of the pool: admit jobs by shares and priority, start them, and answer for them over HTTP.

    Ends on Ctrl-C or SIGTERM; jobs go on, and so does the queue when it is started again. With --tinker programs train
    and sample on the pool by requests instead.
    """
    with one_message_per_mistake():
        if tinker is not None:
            if certificate or key:
                raise SpecError("--tinker: there is no https here; put a proxy with TLS in front")
            from rlix.serve.tinker.settings import load_settings

            offered = load_settings(tinker)  # before what takes long to import
            make_console().print(f"loading PyTorch and {', '.join(offered.models)} ...", highlight=False)
            from rlix.cli.serve import PORT as TINKER_PORT
            from rlix.cli.serve import serve_tinker

            at = TINKER_PORT if port is None else port
            serve_tinker(offered, host=host, port=at, devices=gpus, private=private)
            return
        try:
            from rlix.serve.service import ServeOptions
            from rlix.serve.service import serve as keep
        except ModuleNotFoundError as error:
            raise SpecError(f"{error.name} is not installed: pip install 'rlix[serve]'") from error
        from rlix.control.settings import Settings
        from rlix.serve.queue.pool_runner import PoolRunner

        settings, console = Settings.from_env(), make_console()
        keep(
            ServeOptions(settings.home, runs_dir, host, PORT if port is None else port, certificate, key),
            PoolRunner(settings),
            lambda said: console.print(said, highlight=False, markup=False, soft_wrap=True),
        )


def submit(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Job files, or names of jobs RLix ships with.")],
    priority: Annotated[Class, typer.Option(help="Who of your team is next.")] = "normal",
    preemptible: Annotated[
        bool, typer.Option(help="Whether it may be stopped, with a checkpoint, for those who have a claim.")
    ] = True,
    time: Annotated[
        str | None, typer.Option("--time", help="Longest that it may run, such as 4h: it starts sooner with a limit.")
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Let it wait until `rlix release`.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it needs and when it would start; submit nothing.")
    ] = False,
    given: Given = None,
    webhook: Annotated[
        str,
        typer.Option(metavar="URL", help="Is told, by a POST, that the job has finished or failed, or waits long."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Queue jobs and go: print their numbers."""
    from rlix.cli import queue

    with one_message_per_mistake():
        queue.submit(
            specs, queue.Wish(priority, preemptible, time, hold, dry_run, tuple(given or ()), webhook), as_json=as_json
        )


def ps(mine: Mine = False, as_json: Json = False) -> None:
    """Show the queue and what runs, and why who waits waits."""
    from rlix.cli import queue

    with one_message_per_mistake():
        queue.ps(mine=mine, as_json=as_json)


def history(
    id: Annotated[
        int | None, typer.Argument(metavar="[ID]", parser=_number, help="What has happened to this job.")
    ] = None,
    mine: Mine = False,
    as_json: Json = False,
) -> None:
    """Show jobs that have ended, or all that has happened to one."""
    from rlix.cli import queue

    with one_message_per_mistake():
        queue.history(id, mine=mine, as_json=as_json)


def explain(id: Id, as_json: Json = False) -> None:
    """Say in one sentence why a job waits, what it does, or how it ended."""
    from rlix.cli import queue

    with one_message_per_mistake():
        queue.explain(id, as_json=as_json)


def logs(
    id: Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Print a job's log."""
    from rlix.cli import queue

    with one_message_per_mistake():
        queue.logs(id, follow=follow, as_json=as_json)


def cancel(ids: Ids, as_json: Json = False) -> None:
    """End jobs: those that wait at once, those that run after a checkpoint."""
    _act(ids, "cancel", as_json)


def hold(ids: Ids, as_json: Json = False) -> None:
    """Let waiting jobs wait until they are released."""
    _act(ids, "hold", as_json)


def release(ids: Ids, as_json: Json = False) -> None:
    """Let held jobs take part again."""
    _act(ids, "release", as_json)


def requeue(ids: Ids, as_json: Json = False) -> None:
    """Queue jobs again that have ended, or run: they go on from their latest checkpoint."""
    _act(ids, "requeue", as_json)


def set_priority(
    ids: Ids, to: Annotated[Class, typer.Option("--to", help="The priority class.")], as_json: Json = False
) -> None:
    """Change who of your team is next."""
    from rlix.cli import queue
    from rlix.serve.api.models import PriorityChange

    with one_message_per_mistake():
        queue.act(ids, "priority", PriorityChange(priority=to), as_json=as_json)


def usage(
    since: Annotated[str, typer.Option(help="How far back, such as 12h, 7d or 4w.")] = "7d",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: a row for each job and phase.")] = False,
    as_json: Json = False,
) -> None:
    """Show what jobs, owners and teams were given."""
    from rlix.cli import queue

    with one_message_per_mistake():
        queue.usage(since, as_json=as_json, as_csv=as_csv)


def user(
    name: Annotated[str | None, typer.Argument(help="Who; one that there is gets a new token.")] = None,
    team: Annotated[str, typer.Option(help="The team whose share the user's jobs count to.")] = "default",
    admin: Annotated[
        bool, typer.Option("--admin", help="May do with every job what its owner may, and add users.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take the user's token no more; jobs stay. Prints who is left.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Print who there is, with team and rights.")] = False,
    as_json: Json = False,
) -> None:
    """Add a user of the queue, and print the token that the user sets as RLIX_TOKEN. For admins.

    A name begins with a letter or a digit and holds letters, digits and ._@- only, at most 64.
    """
    from rlix.cli import queue

    with one_message_per_mistake():
        if listed == (name is not None):
            raise SpecError("rlix user: give a NAME, or --list")
        if name is None or remove:
            queue.users(name, as_json=as_json)
            return
        queue.add_user(name, team, admin=admin, as_json=as_json)


def _act(ids: list[int], verb: str, as_json: bool) -> None:
    from rlix.cli import queue

    with one_message_per_mistake():
        queue.act(ids, verb, as_json=as_json)


def add_commands(app: typer.Typer) -> None:
    for command in (serve, submit, ps, logs, explain, cancel, hold, release, requeue, history, usage, user):
        app.command()(command)
    app.command("set-priority")(set_priority)
