"""`rlix simulate`: a workload under one policy or several, on a virtual clock."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rlix.cli.simulate_queue import queues, show_queues
from rlix.protocol.errors import RlixError, SpecError
from rlix.sim.page import averages, column_names, meanings, render, verdict
from rlix.sim.results import POLICIES, Row, policy_named, simulate_one
from rlix.sim.submissions import read_submissions
from rlix.sim.workload import Workload, read_source, validated

_BARS = (("gang", "█", "blue"), ("decode", "▓", "green"), ("load", "▒", "yellow"), ("drain", "░", "red"))
_BAR_WIDTH = 50
_PLAIN_WIDTH = 150  # where there is no terminal to fit into


def simulate(
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="A workload file, or a shipped one by name.")],
    policy: Annotated[list[str] | None, typer.Option(help="A policy to run; may be repeated. Default: all.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Run it on this many GPUs instead.")] = None,
    gangs_move: Annotated[bool, typer.Option("--gangs-move", help="Let gangs run on any block of their size.")] = False,
    gangs_narrow: Annotated[bool, typer.Option("--gangs-narrow", help="And on any block of fewer GPUs.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Repeat with this many seeds.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on stdout; anything else goes to stderr.")
    ] = False,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")] = None,
    check_every: Annotated[int, typer.Option(min=1, help="Validate every n-th plan.")] = 1,
) -> None:
    """Simulate a cluster: the scheduler's own code on a virtual clock, policy by policy."""
    messages = Console(stderr=True)
    try:
        data, origin = read_source(workload)
        if "users" in data:
            found = queues(read_submissions(data, origin), policy, seeds, gpus=gpus)
            show_queues(found, as_json=as_json)
            return
        loaded = validated(data, origin)
        loaded = loaded.resized(gpus) if gpus is not None else loaded
        loaded = loaded.narrowing() if gangs_narrow else loaded.moving() if gangs_move else loaded
        names = list(dict.fromkeys(policy or POLICIES))
        for name in names:
            policy_named(name)
        with _quiet():
            rows = _run(loaded, names, seeds, check_every, html_file is not None, messages)
        if html_file is not None:
            _write(html_file, render(loaded.name, loaded.description, rows), "--html")
    except RlixError as error:
        messages.print(f"[bold red]rlix:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, SpecError) else 1) from None
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        _show(loaded, rows)


@contextmanager
def _quiet() -> Iterator[None]:
    """The control plane warns of every failure; that of a simulated device is no news."""
    control = logging.getLogger("rlix.control")
    before = control.level
    control.setLevel(logging.ERROR)
    try:
        yield
    finally:
        control.setLevel(before)


def _run(
    workload: Workload, names: list[str], seeds: int, check_every: int, keep_series: bool, console: Console
) -> list[Row]:
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(workload.name, total=100 * len(names) * seeds)
        for seed in range(seeds):
            for name in names:
                done = len(rows)
                progress.update(task, description=f"{workload.name} · {name} · seed {seed}")
                rows.append(
                    simulate_one(
                        workload,
                        name,
                        seed,
                        check_every=check_every,
                        keep_series=keep_series and seed == 0,
                        on_progress=lambda share, done=done: progress.update(  # type: ignore[misc]
                            task, completed=100 * done + int(100 * share)
                        ),
                    )
                )
                progress.update(task, completed=100 * len(rows))
    return rows


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{option} {path}: cannot be written ({error.strerror}); choose another path") from error


def _show(workload: Workload, rows: list[Row]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    seeds = len({row.seed for row in rows})
    title = f"{workload.name}: {workload.job_count} jobs on {workload.pool.gpus} GPUs, {seeds} seed(s)"
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in column_names():
        table.add_column(name, justify="right")
    for name, cells in averages(rows):
        table.add_row(name, *cells)
    if said := verdict(rows):
        console.print(said, highlight=False, soft_wrap=True)
    console.print(table)
    for name, meaning in meanings():
        console.print(f"{name:>16}  {meaning}", highlight=False)
    for name in dict.fromkeys(row.policy for row in rows):
        mine = [row for row in rows if row.policy == name]
        bar = "".join(
            f"[{colour}]{sign * round(_BAR_WIDTH * sum(r.use[use] for r in mine) / len(mine))}[/]"
            for use, sign, colour in _BARS
        )
        console.print(f"{name:>14} {bar}", highlight=False)
    legend = "  ".join(f"[{colour}]{sign}[/] {use}" for use, sign, colour in _BARS)
    console.print(f"{'':>14} share of all GPU-seconds until the last job ends: {legend}, rest idle", highlight=False)
