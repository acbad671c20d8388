"""`rlix check`: what is wrong with jobs, and how much memory they will take."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from rlix.cli.answers import CheckAnswer, MemoryAnswer, PhaseAnswer, print_answer
from rlix.cli.view import make_console
from rlix.node.devices import machine_memory
from rlix.pipeline.spec.job import JobSpec, check_jobs, load_jobs
from rlix.pipeline.spec.rows import row_problems
from rlix.pipeline.spec.runs import target_problems
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from rlix.pipeline.memory.job import JobMemory


_GIB = 2**30


def check_specs(
    names: Sequence[str],
    given: Sequence[str] = (),
    *,
    memory_gib: float | None,
    devices: int | None,
    model_config: Path | None,
    as_json: bool = False,
) -> None:
    """Print the memory that each phase of the jobs takes; raises SpecError for what is wrong with them."""
    pool = None if devices is None else range(devices)
    specs = load_jobs(names, pool, given)
    memory = machine_memory() if memory_gib is None else int(memory_gib * _GIB)
    virtual = memory is None if memory_gib is None else None  # else they are those of another machine
    check_jobs(specs, pool, virtual=virtual)
    check_rows(specs, None)
    console = make_console(stderr=as_json)
    if any(spec.is_unplanned for spec in specs):
        from rlix.cli.plans import planned, pool_size

        known = memory if model_config is None else None
        specs = [planned([spec], range(devices or pool_size(spec)), known, console)[0].spec for spec in specs]
    with make_console(stderr=True).status("loading PyTorch, to count the models' parameters ..."):
        found, problems = _memory_of(specs, memory, model_config)
    for spec, needed in () if as_json else found:
        if needed is None:
            console.print(f"{spec.name}: has a pipeline of its own, whose memory is not known", highlight=False)
        else:
            print_memory(spec, needed, memory, console)
    if problems:
        raise SpecError("\n".join(problems))
    if as_json:
        print_answer(CheckAnswer(memory=memory, jobs=tuple(_answer(spec.name, needed) for spec, needed in found)))
        return
    unknown = "whether that fits is not known without a GPU: --memory GIB says how much one has"
    fits = "by this estimate it fits" if memory else unknown
    console.print(f"no mistake in {', '.join(spec.name for spec in specs)}; {fits}", highlight=False, soft_wrap=True)


def _memory_of(
    specs: Sequence[JobSpec], memory: int | None, model_config: Path | None
) -> tuple[list[tuple[JobSpec, "JobMemory | None"]], list[str]]:
    """What each job takes, None where that is not known; and what is wrong with jobs as their models are."""
    from rlix.pipeline.memory.job import job_memory, memory_problems
    from rlix.pipeline.memory.shape import shape_of

    found: list[tuple[JobSpec, JobMemory | None]] = []
    problems: list[str] = []
    for spec in specs:
        if spec.pipeline is not None and not spec.multi_lora:
            found.append((spec, None))
            continue
        try:
            shape = shape_of(spec.model, model_config)
        except SpecError as error:
            problems.append(f"{spec.name}: {error}")
            continue
        problems += [spec.described(problem) for problem in target_problems(spec, shape.linear)]
        problems += _looked_at(spec)
        needed = job_memory(spec, shape, memory)
        found.append((spec, needed))
        if memory is not None:
            problems += [spec.described(problem) for problem in memory_problems(spec, needed, memory)]
    return found, problems


def _answer(name: str, found: "JobMemory | None") -> MemoryAnswer:
    if found is None:
        return MemoryAnswer(name=name, phases=())
    phases = (
        PhaseAnswer(phase=n.phase, cluster=n.cluster, devices=n.devices, parts=n.parts, total=n.total)
        for n in found.needs
    )
    return MemoryAnswer(name=name, phases=tuple(phases), fitting=found.fitting)


def check_rows(specs: Sequence[JobSpec], most_bytes: int | None) -> None:
    """Raises SpecError for rows of the jobs' files that cannot be used; files with more than `most_bytes` are left."""
    if problems := [spec.described(problem) for spec in specs for problem in row_problems(spec, most_bytes)]:
        raise SpecError("\n".join(problems))


def _looked_at(spec: JobSpec) -> list[str]:
    """What is wrong with the tokenizer and with rows for it."""
    from rlix.pipeline.sources.look import look_at_rows

    runs = [run for name, run in spec.run_specs.items() if "source" in spec.runs[name].model_fields_set]
    return [f"{job.name}: {problem}" for job in [spec, *runs] for problem in look_at_rows(job)]


def print_memory(spec: JobSpec, found: "JobMemory", memory: int | None, console: Console) -> None:
    """One line for each phase, in GiB per device."""
    console.width = max(console.width, 120)
    columns = list(dict.fromkeys(name for need in found.needs for name, count in need.parts.items() if count))
    of = "" if memory is None else f" of {memory / _GIB:.1f}"
    table = Table(title=f"{spec.name}: GiB on each device{of}, estimated", title_justify="left", box=None)
    for name in ("phase", "devices", *columns, "all"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True, min_width=len(name))
    for need in found.needs:
        parts = [f"{need.parts[name] / _GIB:.2f}" if need.parts.get(name) else "" for name in columns]
        table.add_row(need.phase, str(need.devices), *parts, f"{need.total / _GIB:.2f}")
    console.print(table)
    if found.fitting is None:
        return
    text = f"a replica decodes {found.fitting} of max_num_seqs {found.sequences} trajectories at a time"
    console.print(f"{text}, if each has the greatest length, {found.longest} tokens", highlight=False)
