"""What must hold between a job and the machine it is submitted from: paths, imports, installed packages."""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlix.pipeline.spec.columns import column_problems
from rlix.pipeline.spec.file import Problem
from rlix.pipeline.spec.logging import LoggingSpec
from rlix.pipeline.spec.named import import_object, is_own, option_problems
from rlix.pipeline.spec.runs import run_of
from rlix.pipeline.spec.sections import Sections
from rlix.pipeline.spec.source import ENVIRONMENT_GIVEN, REWARD_GIVEN, TASK_GIVEN, SourceSpec
from rlix.protocol.errors import SpecError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def environment_problems(spec: Sections) -> Iterator[Problem]:
    """Problems that only this machine can show."""
    yield from _source_problems(spec.source)
    if spec.evaluation and spec.evaluation.source:
        for problem in _source_problems(spec.evaluation.source):
            yield Problem(f"evaluation.{problem.field}", problem.message)
    if spec.model.kind == "pretrained":
        yield from _model_path(spec.model.path)
    for field, named in (("pipeline", spec.pipeline), ("algorithm", spec.algorithm), ("schedule", spec.schedule)):
        if named is not None and is_own(named.name):
            yield from _own(field, named.name, named.options, options_only=True)
    if spec.rollout.executor == "vllm" and find_spec("vllm") is None:
        yield Problem(
            "rollout.executor", "vllm is not installed; run 'pip install rlix[vllm]', or use 'executor: transformers'"
        )
    yield from _loggers(spec.logging)
    if (
        spec.lora is not None
        and spec.lora.path is not None
        and not Path(spec.lora.path, "adapter_config.json").is_file()
    ):
        yield Problem("lora.path", f"{spec.lora.path} is no folder of a PEFT adapter: it holds no adapter_config.json")
    for name, run in spec.runs.items():
        for problem in environment_problems(run_of(spec, name, run)):
            if problem.field.split(".")[0] in run.model_fields_set:  # else it is the job's, and said
                yield Problem(f"runs.{name}.{problem.field}", problem.message)


def _loggers(logging: LoggingSpec) -> Iterator[Problem]:
    for name, given in (("wandb", logging.wandb), ("mlflow", logging.mlflow)):
        if given is not None and find_spec(name) is None:
            yield Problem(f"logging.{name}", f"the package {name} is not installed; run \"pip install 'rlix[{name}]'\"")


def _source_problems(source: SourceSpec) -> Iterator[Problem]:
    if source.chat.template is not None and not Path(source.chat.template).is_file():
        yield Problem("source.chat.template", f"there is no file {source.chat.template}")
    if source.data is not None:
        yield from column_problems(source.data)
    if source.name:
        yield from _own("source", source.name, source.options, options_only=True)
    if source.task:
        yield from _own("source.task", source.task.target, source.task.options, TASK_GIVEN)
    if source.environment:
        yield from _own("source.environment", source.environment.target, source.environment.options, ENVIRONMENT_GIVEN)
    if any(reward.name == "math_verify" for reward in source.rewards) and find_spec("math_verify") is None:
        yield Problem("source.rewards", "math_verify needs the package math-verify; run 'pip install rlix[math]'")
        return
    for i, reward in enumerate(source.rewards):
        yield from _own(f"source.rewards.{i}", reward.target, reward.options, REWARD_GIVEN, partly=True)


def _model_path(given: str) -> Iterator[Problem]:
    path = Path(given)
    if path.is_absolute():
        if not path.is_dir():
            yield Problem(
                "model.path", f"there is no folder {path}; correct the path (it is relative to the job's file)"
            )
        elif not (path / "config.json").is_file():
            yield Problem("model.path", f"{path} holds no config.json, so it is not a saved Hugging Face model")
    elif not _HUB_NAME.fullmatch(given):
        yield Problem("model.path", f"{given!r} is neither a folder nor a hub name such as 'Qwen/Qwen2.5-0.5B'")


def _own(
    field: str,
    name: str,
    options: Mapping[str, Any],
    given: int = 0,
    *,
    options_only: bool = False,
    partly: bool = False,
) -> Iterator[Problem]:
    """Whether `name` can be imported and takes the options. `options_only`: they go to a class `Options` or nowhere;
    `partly`: what the options lack comes from elsewhere."""
    try:
        found = import_object(name)
    except SpecError as error:
        yield Problem(f"{field}.name", str(error))
        return
    if not callable(found):
        yield Problem(f"{field}.name", f"{name} is a {type(found).__name__}, not something that can be called")
    elif getattr(found, "Options", None) is not None or not options_only:
        yield from option_problems(f"{field}.options", found, options, given, partly=partly)
    elif options:
        yield Problem(f"{field}.options", f"{name} has no class 'Options' (a dataclass, say) that says what it takes")
