"""What going on with a run means: from which step, and with what changed since. Nothing is written here."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rlix.node.run_folder import (
    aside_of,
    earlier_runs,
    list_checkpoints,
    newest_checkpoint,
    replace_file,
)
from rlix.pipeline.spec.changes import Change, spec_changes
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.lora import RunSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import read_yaml

logger = logging.getLogger(__name__)

SPEC_FILE = "spec.yaml"
RUNS_FILE = "runs.json"


@dataclass(frozen=True, slots=True)
class Resumption:
    """`step`: how many steps are done, None when there is nothing to go on from. `broken`: newer checkpoints that have
    lost something, and what."""

    name: str
    step: int | None
    broken: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


def note_runs(run_dir: Path, added: Mapping[str, RunSpec], removed: Collection[str]) -> None:
    """Keep what was changed about a multi_lora job's runs while it trained: its user's file does not say it."""
    runs = {name: run.model_dump(mode="json", exclude_unset=True) for name, run in added.items()}
    replace_file(run_dir / RUNS_FILE, json.dumps({"added": runs, "removed": sorted(removed)}).encode())


def changed_runs(run_dir: Path) -> tuple[dict[str, RunSpec], set[str]]:
    """What `note_runs` kept: added, and removed."""
    try:
        found = json.loads((run_dir / RUNS_FILE).read_bytes())
    except FileNotFoundError:
        return {}, set()
    added = {name: RunSpec.model_validate_json(json.dumps(run)) for name, run in found["added"].items()}
    return added, set(found["removed"])


def with_changed_runs(spec: JobSpec, run_dir: Path) -> JobSpec:
    """The spec with the runs that were added, as its file has them if it does, and without those that were removed.

    Raises SpecError when none is left.
    """
    if not spec.runs:
        return spec
    added, removed = changed_runs(run_dir)
    runs = {name: run for name, run in {**added, **spec.runs}.items() if name not in removed}
    if not runs:
        raise SpecError(f"{spec.name}: all its runs were removed; give it one of another name, or leave out --resume")
    return spec.model_copy(update={"runs": runs})


def resumption(spec: JobSpec, run_dir: Path) -> Resumption:
    """Raises SpecError when the run cannot go on with this spec, or none of its checkpoints is whole."""
    checkpoint, broken = newest_checkpoint(run_dir)
    if checkpoint is None:
        return Resumption(spec.name, None)
    spec, old = with_changed_runs(spec, run_dir), _spec_of(run_dir)
    changes = () if old is None else tuple(spec_changes(old, spec))
    if refused := [change for change in changes if change.refused]:
        raise SpecError(_refusal(spec, run_dir, refused))
    lost = tuple(f"{path.name}: {what}" for path, what in broken)
    return Resumption(spec.name, checkpoint[0], lost, changes)


def check_resumable(spec: JobSpec, run_dir: Path) -> Resumption:
    """What `resumption` finds, for a user who asks to go on with a run.

    Raises:
        SpecError: it cannot go on, or has no checkpoint where an earlier run of the same name, moved aside, has some.
    """
    found = resumption(spec, run_dir)
    if found.step is None and (earlier := earlier_runs(run_dir)):
        newest = earlier[0]
        step, _ = list_checkpoints(newest / "checkpoints")[-1]
        away = f"mv {run_dir} {aside_of(run_dir)}; " if aside_of(run_dir) is not None else ""
        away = away or (f"rm -r {run_dir}; " if run_dir.is_dir() else "")
        raise SpecError(
            f"{spec.name}: {run_dir} has no checkpoint, and the run that was there before has: {newest}, after step "
            f"{step}; go on with that one: `{away}mv {newest} {run_dir}`, or begin anew without --resume"
        )
    return found


def shown(value: object) -> str:
    """A value of a spec as a person reads it."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _refusal(spec: JobSpec, run_dir: Path, refused: Sequence[Change]) -> str:
    lines = [f"{c.field}: {shown(c.old)} → {shown(c.new)}: {c.refused}" for c in refused]
    what = f"{spec.name}: the run in {run_dir} cannot go on with what has changed in its spec:"
    fix = "Take this back, or give the job another name, or run it anew without --resume."
    return "\n".join([what, *(f"  {line}" for line in lines), fix])


def _spec_of(run_dir: Path) -> JobSpec | None:
    """The spec that the run had last; None when there is none that can be read."""
    path = run_dir / SPEC_FILE
    try:
        values, _ = read_yaml(path)
        plan = values.get("plan")
        if isinstance(plan, dict) and "chosen" in plan:  # a release before plan.json kept what was planned here
            del values["plan"]
        return JobSpec.model_validate_json(json.dumps(values, default=str))
    except (SpecError, ValidationError) as error:
        logger.warning("%s: cannot be read, so what has changed since is not known: %s", path, error)
        return None
