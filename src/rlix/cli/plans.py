"""`rlix plan JOB`, and what `rlix run` does about jobs that leave their clusters to a plan."""

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from rlix.cli.check import machine_memory
from rlix.control.init import new_pool_size
from rlix.control.settings import Settings
from rlix.flow.planner import Mode
from rlix.pipeline.planning.choose import choose, explain, is_open, unplanned
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.pipeline.spec.plan import PlanSpec
from rlix.protocol.errors import SpecError


def planned(
    specs: Sequence[JobSpec], ids: Sequence[int], home: Path, memory: int | None, console: Console
) -> list[JobSpec]:
    """The jobs with their clusters, and a line about each that was planned. Each is planned as if it were alone."""
    found = []
    for spec in specs:
        if is_open(spec):
            chosen = choose(spec, ids, home, memory)
            console.print(chosen.line, markup=False, highlight=False, soft_wrap=True)
            found.append(chosen.spec)
        else:
            found.append(spec)
    return found


def plan_job_file(name: str, gpus: int | None, gigabytes: float, mode: str | None) -> None:
    """Explain the fastest plan of a job and its runner-up; what the job says of its clusters' widths does not count."""
    spec, settings = unplanned(load_job(name)), Settings.from_env()
    wanted = spec.plan or PlanSpec()
    if mode not in (None, "auto", *Mode):
        raise SpecError(f"--mode {mode}: must be auto, {', '.join(Mode)}")
    devices = gpus or wanted.gpus or new_pool_size(settings)
    memory = int(gigabytes * 1e9) if gigabytes else machine_memory()
    spec = spec.model_copy(update={"plan": wanted.model_copy(update={"gpus": devices, "mode": mode or wanted.mode})})
    chosen = choose(spec, range(devices), settings.home, memory)
    typer.echo(chosen.source)
    typer.echo(explain(spec, chosen.planned, devices, settings.home, memory))
