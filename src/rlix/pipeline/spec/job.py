"""What a user writes to describe a job: nested, frozen sections that are checked before anything starts."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import PrivateAttr, ValidationError, model_validator

from rlix.engine.executors.registry import backend
from rlix.pipeline.spec.checks import inconsistencies
from rlix.pipeline.spec.clusters import ClusterSpec, ClustersSpec, node_problems, pool_problems
from rlix.pipeline.spec.columns import is_path
from rlix.pipeline.spec.environment import device_problems, environment_problems
from rlix.pipeline.spec.lora import RunSpec
from rlix.pipeline.spec.named import shipped_or_own
from rlix.pipeline.spec.old_keys import moved
from rlix.pipeline.spec.runs import run_of, run_problems
from rlix.pipeline.spec.section import Section
from rlix.pipeline.spec.sections import Sections
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Origin, Problem, inconsistent, nearest, problems_of, read_yaml, with_values
from rlix.protocol.types import ClusterName

_LEAST: dict[str, Any] = {"name": "x", "steps": 1, "rollout": {"max_new_tokens": 1}}
"""All that a job must say for itself."""
_NAMING = ("name", "task", "environment", "openai", "rewards", "options", "executor")


class JobSpec(Sections):
    """A job, as a YAML file or as keyword arguments."""

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def clusters_in_use(self) -> dict[str, ClusterSpec]:
        """All worker sets; a reference model or critic that is needed but not mentioned is like `actor_train`."""
        needs = self.algorithm.needs(off_policy=False)
        wanted = {
            ClusterName.REFERENCE: needs.reference_engine(adapter=bool(self.lora or self.runs)),
            ClusterName.CRITIC: needs.critic is not None,
        }
        left_out = {name.value: self.clusters.actor_train for name, is_needed in wanted.items() if is_needed}
        given = dict(self.clusters.items())
        if not self.generates:
            del given[ClusterName.ACTOR_INFER]
        return left_out | given

    def to_yaml(self) -> str:
        """A file that `load_job` reads back as an equal spec."""
        return yaml.dump(_plain(self), Dumper=_Dumper, sort_keys=False, width=120)

    def check_devices(self, pool: Collection[int]) -> None:
        """Raise SpecError when a cluster needs devices that a pool with these device ids does not have."""
        if problems := list(pool_problems(self.clusters, pool)):
            raise self._origin.error(problems)

    def described(self, problem: Problem) -> str:
        """The problem with file and line, where this came from a file."""
        return self._origin.describe(problem)

    @property
    def file(self) -> str:
        """Where it was read from; "" of a spec that was made in a program."""
        return self._origin.path

    @property
    def run_specs(self) -> dict[str, "JobSpec"]:
        """Of a multi_lora job: each run as the job that it would be alone."""
        return {name: run_of(self, name, run) for name, run in self.runs.items()}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = inconsistencies(self) or list(run_problems(self))
        if problems:
            raise inconsistent(problems)
        return self


def _plain(value: Any) -> Any:
    """As YAML has it, without what is empty unless said otherwise."""
    if isinstance(value, Section):
        empty = [name for name, f in type(value).model_fields.items() if _is_empty(getattr(value, name), f.default)]
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields if name not in empty}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _is_empty(value: Any, default: Any) -> bool:
    return (
        value == {} or (value in (None, ()) and value == default) or (isinstance(value, Section) and not _plain(value))
    )


class _Dumper(yaml.SafeDumper):
    """Lists on one line, sections on many."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def shipped_jobs() -> list[str]:
    """Names of the jobs that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in _examples().iterdir() if p.name.endswith(".yaml"))


def shipped_path(name: str) -> Path:
    """The file of one of them."""
    return Path(str(_examples() / f"{name}.yaml"))


def load_job(path_or_name: str | Path, pool: Collection[int] | None = None, given: Sequence[str] = ()) -> JobSpec:
    """Read and check a job: a YAML file by path, or the name of one that ships with the package.

    Paths inside the file are relative to it, and absolute in the result. Raises SpecError with one line per problem,
    each naming file, line, field and fix; if there are any, also what a `pool` of devices with these ids lacks.

    Args:
        given: values in place of the file's, as `rollout.temperature=0.8`.
    """
    path = _find(path_or_name)
    data, origin = with_values(*read_yaml(path), given)
    with _paths_of(origin):
        return _checked(_anchored(data, path.parent), origin, pool)


def load_jobs(names: Sequence[str], pool: Collection[int] | None = None, given: Sequence[str] = ()) -> list[JobSpec]:
    """Each of them, as `load_job` does. Raises SpecError with what is wrong with any, or for a file given twice."""
    found: dict[Path, JobSpec] = {}
    wrong: dict[Path, str] = {}
    for name in names:
        path = _expanded(Path(name)).absolute()
        if path in found or path in wrong:
            wrong[path] = f"{name}: is given twice; name each job once"
            continue
        try:
            found[path] = load_job(name, pool, given)
        except SpecError as error:
            wrong[path] = str(error)
    if wrong:
        raise SpecError("\n".join(wrong.values()))
    return list(found.values())


def job_text(path: Path, given: Sequence[str] = ()) -> str:
    """The job file; with values in place of its own, see `load_job`, one that says the same."""
    if not given:
        return path.read_text(encoding="utf-8")
    data, _ = with_values(*read_yaml(path), given)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120)


def named_files(path: Path, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The paths in a job file that are relative to it, as they stand there: what must go with it to another machine.

    Raises SpecError for a file that cannot be read.
    """
    data, origin = with_values(*read_yaml(path), given)
    with _paths_of(origin):
        return tuple(dict.fromkeys(_differing(data, _anchored(data, path.parent))))


def _differing(given: Any, anchored: Any) -> Iterator[str]:
    if isinstance(given, str) and given != anchored:
        file, _, _ = given.rpartition(":")
        yield file if file.endswith(".py") else given
    elif isinstance(given, dict) and isinstance(anchored, dict):
        for key, value in given.items():
            yield from _differing(value, anchored.get(key))
    elif isinstance(given, list) and isinstance(anchored, list):
        for one, other in zip(given, anchored, strict=True):
            yield from _differing(one, other)


def _checked(data: dict[str, Any], origin: Origin, pool: Collection[int] | None) -> JobSpec:
    try:
        # JSON mode is strict about types, yet takes a list for a tuple as YAML must.
        spec = JobSpec.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        lacking = [] if pool is None else _lacking(data, pool)
        own = problems_of(error.errors(), JobSpec, data, moved)
        raise origin.error([*lacking, *own, *_between_others(data, error)]) from None
    spec._origin = origin
    if problems := list(environment_problems(spec)):
        raise origin.error(problems)
    return spec


def _between_others(data: dict[str, Any], error: ValidationError) -> list[Problem]:
    """What is wrong between the sections that have no mistake of their own."""
    wrong = {str(each["loc"][0]) if each["loc"] else "" for each in error.errors()}
    if not wrong <= Sections.model_fields.keys():  # between them all; or by a key that is none, and may stand for any
        return []
    rest = {key: value for key, value in data.items() if key not in wrong}
    rest |= {key: value for key, value in _LEAST.items() if key in wrong}
    return inconsistencies(Sections.model_validate_json(json.dumps(rest, default=str)), left_out=wrong)


def _lacking(data: dict[str, Any], pool: Collection[int]) -> list[Problem]:
    """What the pool lacks for a job with other mistakes, which may follow from this one."""
    with suppress(ValidationError):
        return list(pool_problems(ClustersSpec.model_validate_json(json.dumps(data.get("clusters") or {})), pool))
    return []


def load_run(path: Path) -> RunSpec:
    """Read a run of a multi_lora job from a file of its own. Raises SpecError as `load_job` does."""
    if not path.is_file():
        raise SpecError(f"{path}: no such file")
    data, origin = read_yaml(path)
    with _paths_of(origin):
        data = _anchored(data, path.parent)
    try:
        return RunSpec.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise origin.error(problems_of(error.errors(), RunSpec, data, moved)) from None


def check_jobs(
    specs: Sequence[JobSpec], pool: Collection[int] | None, *, virtual: bool | None = None, nodes: Sequence[int] = ()
) -> None:
    """Raise SpecError when the jobs cannot run together on a pool.

    Args:
        pool: ids of its devices; None: any pool.
        virtual: whether these are virtual GPUs; None: not known.
        nodes: how many of them each of its nodes has; empty: not known.
    """
    lines: list[str] = []
    first: dict[str, JobSpec] = {}
    for spec in specs:
        if spec.name in first:
            other = first[spec.name]._origin.path or "another job"
            lines.append(
                spec._origin.describe(Problem("name", f"{spec.name!r} is also the name of {other}; rename one"))
            )
        first.setdefault(spec.name, spec)
        if pool is not None:
            lines += [spec._origin.describe(problem) for problem in pool_problems(spec.clusters, pool)]
        if virtual is not None:
            lines += [spec._origin.describe(problem) for problem in device_problems(spec, virtual=virtual)]
        if nodes and (spec.pipeline is None or spec.multi_lora):
            spans = backend(shipped_or_own(spec.rollout.executor)).spans
            lines += [spec._origin.describe(problem) for problem in node_problems(spec.clusters, nodes, spans=spans)]
    if lines:
        raise SpecError("\n".join(lines))


@contextmanager
def _paths_of(origin: Origin) -> Iterator[None]:
    """What is not just missing: in a folder that may not be read, or no name of a file at all."""
    try:
        yield
    except OSError as error:
        raise origin.error([Problem("", f"cannot look at {error.filename}: {error.strerror}")]) from error


def _find(path_or_name: str | Path) -> Path:
    path = _expanded(Path(path_or_name))
    with _paths_of(Origin(str(path))):
        if path.is_file():
            return path
    shipped = shipped_jobs()
    if str(path) in shipped:
        return shipped_path(str(path))
    if path.is_dir():
        raise SpecError(f"{path}: is a folder; name the job's YAML file in it")
    if path.exists():
        raise SpecError(f"{path}: is no regular file; write the job into one")
    beside = [path.with_name(p.name) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    jobs = [str(p) for p in beside if nearest(str(path), [str(p)]) and _is_a_job(p)]
    hint = nearest(str(path), jobs) or nearest(path.name.removesuffix(".yaml"), shipped)
    raise SpecError(f"{path}: no such file, and no job that ships with rlix ({', '.join(shipped)}){hint}")


def _is_a_job(path: Path) -> bool:
    """By the keys that every job has and other files of YAML have not."""
    with suppress(SpecError):
        return {"name", "steps"} <= read_yaml(path)[0].keys()
    return False


def _examples() -> Any:
    return resources.files("rlix") / "examples"


def _anchored(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """With absolute paths. A model that is no folder here and does not look like a path is a name on the hub."""
    data = dict(data)
    if isinstance(model := data.get("model"), dict) and isinstance(given := model.get("path"), str):
        path = _absolute(base, given)
        if given and (path.exists() or given.startswith((".", "~", "/"))):
            data["model"] = {**model, "path": str(path)}
    for section in ("source", "schedule", "algorithm", "pipeline", "rollout", "training"):
        if section in data:
            data[section] = with_files(data[section], base)
    if isinstance(runs := data.get("runs"), dict):
        data["runs"] = {name: _anchored(run, base) if isinstance(run, dict) else run for name, run in runs.items()}
    if isinstance(lora := data.get("lora"), dict) and isinstance(lora.get("path"), str):
        data["lora"] = {**lora, "path": str(_absolute(base, lora["path"]))}
    source = data.get("source")
    if isinstance(source, dict) and isinstance(rows := source.get("data"), dict):
        data["source"] = source = {**source, "data": _with_path(rows, base)}
    chat: Any = source.get("chat") if isinstance(source, dict) else None
    if isinstance(source, dict) and isinstance(chat, dict) and isinstance(template := chat.get("template"), str):
        data["source"] = {**source, "chat": {**chat, "template": str(_absolute(base, template))}}
    for section in ("source", "warmup"):
        given = data.get(section)
        if isinstance(given, dict) and isinstance(rows := given.get("conversations"), dict):
            data[section] = {**given, "conversations": _with_path(rows, base)}
    evaluation = data.get("evaluation")
    if isinstance(evaluation, dict):
        data["evaluation"] = _anchored(evaluation, base)
    if isinstance(sets := data.get("sets"), dict):
        data["sets"] = {name: _anchored(one, base) if isinstance(one, dict) else one for name, one in sets.items()}
    return data


def with_files(value: Any, base: Path, *, everywhere: bool = False) -> Any:
    """Names of the form `file.py:name` with the whole path of the file: where something is named, and in options."""
    if isinstance(value, str):
        file, colon, name = value.rpartition(":")
        return f"{_absolute(base, file)}:{name}" if colon and file.endswith(".py") else value
    if isinstance(value, list):
        return [with_files(item, base, everywhere=everywhere) for item in value]
    if isinstance(value, dict):
        return {
            key: with_files(item, base, everywhere=everywhere or key == "options")
            if everywhere or key in _NAMING
            else item
            for key, item in value.items()
        }
    return value


def _with_path(table: Any, base: Path) -> Any:
    """What is no file or folder here, and does not look like one, is a name on the hub."""
    if not isinstance(table, dict):
        return table
    if isinstance(mix := table.get("mix"), list):
        table = {**table, "mix": [_with_path(part, base) for part in mix]}
    given = table.get("path")
    if isinstance(given, str) and given and (is_path(given) or _absolute(base, given).exists()):
        table = {**table, "path": str(_absolute(base, given))}
    return table


def _absolute(base: Path, given: str) -> Path:
    return (base / _expanded(Path(given))).absolute()


def _expanded(path: Path) -> Path:
    """With the home folder in place of `~`; as it is where there is no such user."""
    with suppress(RuntimeError):
        return path.expanduser()
    return path
