"""`rlix simulate`: what it takes."""

from pathlib import Path
from typing import Annotated

import typer

from rlix.cli.mistakes import one_message_per_mistake


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
    with one_message_per_mistake():
        from rlix.cli.simulation import SimulateOptions, simulate_workload

        simulate_workload(
            SimulateOptions(
                workload, policy or (), gpus, gangs_move, gangs_narrow, seeds, as_json, html_file, check_every
            )
        )
