"""What `rlix profile` and `rlix plan` print of flows and jobs alike."""

from pathlib import Path

import typer

from rlix.cli.answers import PlanAnswer, ProfileAnswer, print_answer
from rlix.flow.planner import Mode, Planned
from rlix.flow.profiler.profile import Profile


def say_profile(found: Profile, path: Path, *, as_json: bool) -> None:
    if as_json:
        print_answer(ProfileAnswer(path=str(path), tables=found.describe()))
        return
    typer.echo(found.describe())
    typer.echo(f"kept in {path}")


def say_plan(planned: Planned, before: str, explanation: str, *, as_json: bool) -> None:
    """`before`: what it was made from."""
    if not as_json:
        typer.echo(before)
        typer.echo(explanation)
        return
    best, modes = planned.best, {mode.value: plan.seconds for mode in Mode if (plan := planned.of(mode)) is not None}
    print_answer(
        PlanAnswer(
            mode=best.mode,
            seconds=best.seconds,
            devices=best.devices,
            modes=modes,
            guesses=planned.guesses,
            explanation=explanation,
        )
    )
