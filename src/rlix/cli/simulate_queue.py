"""`rlix simulate` of people who submit: the queue's own decisions beside simpler queues."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean

import typer
from rich.table import Table

from rlix.cli.view import make_console
from rlix.protocol.spec_file import Origin
from rlix.sim.submissions import QUEUES, QueueRow, Submissions, TeamRow, read_submissions, simulate_queue

_SUMS: Sequence[tuple[str, Callable[[QueueRow], float], str]] = (
    ("GPUs used", lambda row: 100 * row.used_share, "{:.1f} %"),
    ("mean wait", lambda row: row.wait_mean_h, "{:.2f} h"),
    ("95th percentile", lambda row: row.wait_p95_h, "{:.1f} h"),
    ("longest", lambda row: row.wait_max_h, "{:.1f} h"),
    ("slowdown", lambda row: row.slowdown_mean, "{:.1f}"),
    ("preempted", lambda row: row.preemptions, "{:.0f}"),
    ("GPU-hours lost by it", lambda row: row.lost_gpu_h, "{:.0f}"),
)
_TEAMS: Sequence[tuple[str, Callable[[TeamRow], float], str]] = (
    ("of all given", lambda row: 100 * row.share, "{:.0f} %"),
    ("mean wait", lambda row: row.wait_mean_h, "{:.2f} h"),
    ("95th percentile", lambda row: row.wait_p95_h, "{:.1f} h"),
    ("longest", lambda row: row.wait_max_h, "{:.1f} h"),
)


def queues(submissions: Submissions, policies: Sequence[str] | None, seeds: int, *, gpus: int | None) -> list[QueueRow]:
    """Each policy with each seed. Raises SpecError: there is no such policy, or nobody fits so many GPUs."""
    if gpus is not None:
        data = submissions.model_dump() | {"gpus": gpus}
        submissions = read_submissions(data, Origin(f"{submissions.name} on {gpus} GPUs"))
    names = list(dict.fromkeys(policies or QUEUES))
    return [simulate_queue(submissions, name, seed) for seed in range(seeds) for name in names]


def show_queues(rows: Sequence[QueueRow], *, as_json: bool) -> None:
    """Means over the seeds."""
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    names, seeds = list(dict.fromkeys(row.policy for row in rows)), len({row.seed for row in rows})
    first = rows[0]
    title = f"{first.workload}: {first.jobs} jobs on {first.gpus} GPUs, {seeds} seed(s); waits until a job first starts"
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name, _, _ in _SUMS:
        table.add_column(name, justify="right")
    for policy in names:
        mine = [row for row in rows if row.policy == policy]
        table.add_row(policy, *(form.format(mean(of(row) for row in mine)) for _, of, form in _SUMS))
    teams = Table(title="By team", title_justify="left")
    for name in ("team", "policy"):
        teams.add_column(name, no_wrap=True)
    for name, _, _ in _TEAMS:
        teams.add_column(name, justify="right")
    for team in dict.fromkeys(each.team for row in rows for each in row.teams):
        for policy in names:
            found = [each for row in rows if row.policy == policy for each in row.teams if each.team == team]
            teams.add_row(team, policy, *(form.format(mean(of(row) for row in found)) for _, of, form in _TEAMS))
        teams.add_section()
    console = make_console()
    console.print(table, teams)
