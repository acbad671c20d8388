"""What `rlix simulate` does: a workload under one policy or several, on a virtual clock."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rlix.cli.simulate_queue import queues, show_queues
from rlix.protocol.errors import SpecError
from rlix.sim.page import averages, column_names, meanings, render, verdict
from rlix.sim.results import POLICIES, Row, policy_named, simulate_one
from rlix.sim.submissions import read_submissions
from rlix.sim.workload import Workload, read_source, validated

_BARS = (("gang", "█", "blue"), ("decode", "▓", "green"), ("load", "▒", "yellow"), ("drain", "░", "red"))
_BAR_WIDTH = 50
_PLAIN_WIDTH = 150  # where there is no terminal to fit into


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the user asked for; see `rlix simulate --help`."""

    workload: str
    policies: Sequence[str] = ()
    gpus: int | None = None
    gangs_move: bool = False
    gangs_narrow: bool = False
    seeds: int = 1
    as_json: bool = False
    html_file: Path | None = None
    check_every: int = 1


def simulate_workload(options: SimulateOptions) -> None:
    """Simulates and prints. Raises SpecError for a mistake in the workload or an option."""
    data, origin = read_source(options.workload)
    if "users" in data:
        found = queues(read_submissions(data, origin), options.policies, options.seeds, gpus=options.gpus)
        show_queues(found, as_json=options.as_json)
        return
    loaded = validated(data, origin)
    loaded = loaded.resized(options.gpus) if options.gpus is not None else loaded
    loaded = loaded.narrowing() if options.gangs_narrow else loaded.moving() if options.gangs_move else loaded
    names = list(dict.fromkeys(options.policies or POLICIES))
    for name in names:
        policy_named(name)
    with _quiet():
        rows = _run(loaded, names, options.seeds, options.check_every, options.html_file is not None)
    if options.html_file is not None:
        _write(options.html_file, render(loaded.name, loaded.description, rows), "--html")
    if options.as_json:
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


def _run(workload: Workload, names: list[str], seeds: int, check_every: int, keep_series: bool) -> list[Row]:
    rows: list[Row] = []
    console = Console(stderr=True)
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
