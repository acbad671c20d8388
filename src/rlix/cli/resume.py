"""What `rlix run` says of earlier runs before anything starts: where each job goes on, or where they move."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from rlix.node.run_folder import aside_of, list_checkpoints, take_back
from rlix.pipeline.jobs.resume import Resumption, check_resumable, shown
from rlix.pipeline.spec.job import JobSpec


def take_back_folders(specs: Sequence[JobSpec], runs_dir: Path, console: Console) -> None:
    """Runs whose place a start has that was killed before its first step have it again.

    Raises SpecError when another process writes into such a folder.
    """
    for spec in specs:
        if (moved := take_back(runs_dir / spec.name)) is not None:
            _say(console, f"{spec.name}: a start that was killed before its first step is in {moved}")


def say_resumptions(specs: Sequence[JobSpec], runs_dir: Path, console: Console) -> list[JobSpec]:
    """Those that have something left to do. Raises SpecError when one of them cannot go on with its spec."""
    left = []
    for spec, found in [(spec, check_resumable(spec, runs_dir / spec.name)) for spec in specs]:
        for broken in found.broken:
            _say(console, f"{found.name}: checkpoint {broken}; it is not gone on from")
        changed = ", with a changed spec:" if found.changes else ""
        if found.step is None:
            _say(console, f"{found.name}: {runs_dir / spec.name} has no checkpoint, so it begins anew")
        elif found.step >= spec.steps and not spec.multi_lora:
            _say(console, f"{found.name}: has done {found.step} steps, and nothing of its {spec.steps} is left to do")
            continue
        else:
            _say(console, f"{found.name}: goes on after step {found.step}{changed}")
        if found.changes:
            console.print(_table(found))
        left.append(spec)
    return left


def say_moves(specs: Sequence[JobSpec], runs_dir: Path, console: Console) -> None:
    """Which earlier runs of the same names make room."""
    for spec in specs:
        folder = runs_dir / spec.name
        if (aside := aside_of(folder)) is not None:
            done = list_checkpoints(folder / "checkpoints")
            what = f"an earlier run, with a checkpoint after step {done[-1][0]}," if done else "an earlier run"
            on = " (to go on with it instead: --resume)" if done else ""
            _say(console, f"{spec.name}: {what} is in {folder} and moves to {aside}{on}")


def _table(found: Resumption) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("field", "was", "is now", ""):
        table.add_column(column, overflow="fold")
    for change in found.changes:
        table.add_row(change.field, shown(change.old), shown(change.new), change.note)
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
