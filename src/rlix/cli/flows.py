"""`rlix profile` and `rlix plan`: what the parts of a flow cost here, and how it would best run."""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rlix.cli.plan_picture import Drawn
from rlix.cli.said_plans import say_plan, say_profile
from rlix.control.connect import IMPORT_FROM
from rlix.control.program import attach
from rlix.control.settings import Settings
from rlix.flow.planner import Mode
from rlix.flow.profiler.measure import Grid
from rlix.flow.profiler.profile import Profile, halves, path_of
from rlix.flow.programs.flow import GANG, Flow, importing, measured
from rlix.pipeline.spec.named import where_raised
from rlix.protocol.errors import SpecError
from rlix.protocol.types import LONGEST_NAME
from rlix.workers.launch import DEFAULT_TIMEOUT_S


def is_flow(name: str) -> bool:
    """Whether this names a flow; else it names a job."""
    return name.partition(":")[0].endswith(".py")


def load_flow(name: str) -> Flow:
    """The flow of `path/to/file.py:flow`.

    Raises:
        SpecError: there is no such file, it cannot be imported, or it defines no flow of that name.
    """
    file, _, variable = name.partition(":")
    path = Path(file)
    variable = variable or "flow"
    if not path.is_file():
        raise SpecError(f"{file}: no such file; name a flow as path/to/file.py:flow")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent.absolute())
    sys.path.insert(0, folder)
    IMPORT_FROM.append(folder)  # workers import the file by its name
    sys.modules[path.stem] = module
    try:
        with importing():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything while it is imported
        raise SpecError(f"{file} cannot be imported: {where_raised(error)}") from error
    flow = getattr(module, variable, None)
    if not isinstance(flow, Flow):
        raise SpecError(f"{file} defines no flow {variable!r}")
    return flow


def profile_flow(
    name: str,
    gpus: int,
    widths: Sequence[int],
    batches: Sequence[int],
    repeats: int,
    timeout_s: float | None,
    *,
    as_json: bool = False,
) -> None:
    """Measure every part on `gpus` devices, and keep the tables of this kind of machine."""
    flow = load_flow(name)
    grid = Grid(tuple(widths) or halves(gpus), tuple(batches) or halves(flow.items, flow.items // 16), repeats)
    with attach(f"profile {flow.name}"[:LONGEST_NAME], gangs={GANG: gpus}, stay=True) as job:
        found = measured(flow, job, timeout_s or DEFAULT_TIMEOUT_S, grid)
    say_profile(found, path_of(Settings.from_env().home, flow.name), as_json=as_json)


def plan_flow(
    name: str, gpus: int, memory_gib: float | None, mode: str, html_file: Path | None, *, as_json: bool = False
) -> None:
    """Show the fastest plan and its runner-up, from the tables of this kind of machine."""
    logging.getLogger("rlix.flow").setLevel(logging.WARNING)
    flow = load_flow(name)
    known = Profile.read(path_of(Settings.from_env().home, flow.name), f"rlix profile {name} --gpus {gpus}")
    if mode not in ("auto", *Mode):
        raise SpecError(f"--mode {mode}: must be auto, {', '.join(Mode)}")
    only = None if mode == "auto" else Mode(mode)
    planned = flow.plan(known, gpus, device_bytes=memory_gib * 2**30 if memory_gib else None, mode=only)
    after = {part.name: flow.before(part.name) for part in flow.parts}
    drawn = Drawn(flow.name, planned, after, {part.name: part.peak_bytes for part in planned.best.parts})
    say_plan(drawn, known.describe(), planned.explain(), html_file, as_json=as_json)
