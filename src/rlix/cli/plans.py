"""`rlix plan JOB`, and what `rlix run` does about jobs that leave their clusters to a plan."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from rich.console import Console

from rlix.cli.plan_picture import Drawn
from rlix.cli.pool import shared_pool
from rlix.cli.said_plans import say_plan, say_profile
from rlix.control.init import new_pool_size
from rlix.control.settings import Settings
from rlix.flow.planner import Mode
from rlix.flow.profiler.profile import halves, machine
from rlix.monitor.records import RunRecord, load_run
from rlix.node.devices import machine_memory
from rlix.pipeline.jobs.launch import launch
from rlix.pipeline.planning.choose import bytes_of, choose, explain, profile_path, tables, unplanned
from rlix.pipeline.planning.graph import parts_of
from rlix.pipeline.planning.made import PlannedJob
from rlix.pipeline.planning.profiling import Trial, measured, trials
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.pipeline.spec.plan import PlanSpec
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.types import ClusterName

TRIAL_S = 3600.0
"""Longest that the few steps of one width may take, where nobody says."""


def planned(
    specs: Sequence[JobSpec], ids: Sequence[int], memory: int | None, console: Console, resumed: Path | None = None
) -> list[PlannedJob]:
    """The jobs with their clusters, and a line about each that was planned. Each is planned as if it were alone.

    `resumed`: where the run folders of jobs are that go on.
    """
    home = Settings.from_env().home
    found = []
    for spec in specs:
        if spec.is_unplanned:
            chosen = choose(spec, ids, home, memory, None if resumed is None else resumed / spec.name)
            console.print(chosen.line, markup=False, highlight=False, soft_wrap=True)
            found.append(chosen.job)
        else:
            found.append(PlannedJob(spec))
    return found


def check_tables(specs: Sequence[JobSpec]) -> None:
    """Before anything is started. Raises SpecError: there are no tables to plan a job by that asks for it."""
    for spec in specs:
        if spec.is_unplanned and spec.declared_speed is None:
            tables(spec, pool_size(spec), Settings.from_env().home, ahead=spec.schedule.works_ahead)


def pool_size(spec: JobSpec) -> int:
    """How many devices a job is planned for where nothing runs that could be asked."""
    return (spec.plan and spec.plan.gpus) or new_pool_size(Settings.from_env())


def profile_job_file(
    name: str,
    gpus: int | None,
    widths: Sequence[int],
    prompts: Sequence[int],
    repeats: int,
    timeout_s: float | None,
    *,
    as_json: bool = False,
) -> None:
    """Run a few steps of the job for each width, alone where nobody else is in the pool, and keep the tables."""
    spec, settings = unplanned(load_job(name)), Settings.from_env()
    if spec.declared_speed is not None:
        raise SpecError(f"{name}: has a declared_speed, which `rlix plan` plans from without a profile")
    if spec.pipeline is not None:
        raise SpecError(f"{name}: has a pipeline of its own, whose parts are not known")
    devices = gpus or pool_size(spec)
    most = spec.rollout.prompts_per_step
    sizes = tuple(prompts) or halves(most, most // 4)
    wanted = trials(spec, devices, tuple(widths) or halves(devices), sizes, repeats)
    with shared_pool(settings, None, devices) as pool, TemporaryDirectory(prefix="rlix-profile-") as folder:
        typer.echo(pool.said, err=as_json)
        runs = [(trial.width, _run(trial, Path(folder), timeout_s or TRIAL_S)) for trial in wanted]
    found = measured(spec, runs, machine())
    path = profile_path(settings.home, spec)
    found.write(path)
    say_profile(found, path, as_json=as_json)


def _run(trial: Trial, folder: Path, timeout_s: float) -> RunRecord:
    (handle,) = launch([trial.spec], folder)
    try:
        last = handle.wait(timeout_s)
    finally:
        handle.close()
    if last.state != "finished":
        raise RlixError(f"profile: {trial.spec.name} {last.state}: {last.error or 'it was stopped'}")
    typer.echo(f"measured on {trial.width} rank(s)", err=True)
    return load_run(folder / trial.spec.name)


def plan_job_file(
    name: str,
    gpus: int | None,
    memory_gib: float | None,
    mode: str | None,
    html_file: Path | None,
    *,
    as_json: bool = False,
) -> None:
    """Show the fastest plan of a job and its runner-up; what the job says of its clusters' widths does not count."""
    spec, settings = unplanned(load_job(name)), Settings.from_env()
    wanted = spec.plan or PlanSpec()
    if mode not in (None, "auto", *Mode):
        raise SpecError(f"--mode {mode}: must be auto, {', '.join(Mode)}")
    devices = gpus or pool_size(spec)
    memory = int(memory_gib * 2**30) if memory_gib else machine_memory()
    spec = spec.model_copy(update={"plan": wanted.model_copy(update={"gpus": devices, "mode": mode or wanted.mode})})
    chosen = choose(spec, range(devices), settings.home, memory)
    explanation = explain(spec, chosen.planned, devices, settings.home, memory)
    names = [part for part in parts_of(spec) if not (spec.schedule.works_ahead and part == ClusterName.ACTOR_INFER)]
    after = {part: names[:i] for i, part in enumerate(names)}
    try:
        need = bytes_of(chosen.spec, memory)
    except SpecError:  # the model's configuration cannot be had here, of which no plan needs to know
        need = {}
    say_plan(Drawn(spec.name, chosen.planned, after, need), chosen.source, explanation, html_file, as_json=as_json)
