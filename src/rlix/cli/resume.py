"""What `rlix run --resume` says before anything starts: where each job goes on, and what has changed since."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from rlix.pipeline.jobs.resume import Resumption, resumption, shown
from rlix.pipeline.spec.job import JobSpec


def say_resumptions(specs: Sequence[JobSpec], runs_dir: Path, console: Console) -> None:
    """Raises SpecError when one of them cannot go on with its spec."""
    for spec, found in [(spec, resumption(spec, runs_dir / spec.name)) for spec in specs]:
        for broken in found.broken:
            _say(console, f"{found.name}: checkpoint {broken}; it is not gone on from")
        if found.step is None:
            _say(console, f"{found.name}: has no checkpoint, so it begins anew")
        else:
            over = found.step >= spec.steps and not spec.multi_lora
            what = f"has done {found.step} steps, and nothing of its {spec.steps} is left to do" if over else ""
            changed = ", with a changed spec:" if found.changes else ""
            _say(console, f"{found.name}: {what or f'goes on after step {found.step}'}{changed}")
        if found.changes:
            console.print(_table(found))


def _table(found: Resumption) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("field", "was", "is now", ""):
        table.add_column(column, overflow="fold")
    for change in found.changes:
        table.add_row(change.field, shown(change.old), shown(change.new), change.note)
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
