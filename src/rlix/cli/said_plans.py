"""What `rlix profile` and `rlix plan` print of flows and jobs alike."""

from pathlib import Path

import typer

from rlix.cli.answers import PlanAnswer, ProfileAnswer, print_answer
from rlix.cli.plan_picture import Drawn, print_picture, write_page
from rlix.cli.view import make_console
from rlix.flow.planner import Mode
from rlix.flow.profiler.profile import Profile


def say_profile(found: Profile, path: Path, *, as_json: bool) -> None:
    if as_json:
        print_answer(ProfileAnswer(path=str(path), tables=found.describe()))
        return
    typer.echo(found.describe())
    typer.echo(f"kept in {path}")


def say_plan(drawn: Drawn, before: str, explanation: str, html_file: Path | None, *, as_json: bool) -> None:
    """As a picture and in words. `before`: what it was made from."""
    planned = drawn.planned
    if html_file is not None:
        write_page(drawn, explanation, html_file)
    if not as_json:
        typer.echo(before)
        print_picture(drawn, make_console())
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
