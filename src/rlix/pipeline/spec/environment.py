"""What must hold between a job and the machine it is submitted from: paths, imports, installed packages."""

import inspect
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlix.engine.executors.registry import Backend
from rlix.pipeline.spec.columns import column_problems, conversation_problems, data_fields, is_hub_name, known_columns
from rlix.pipeline.spec.executor import own_options
from rlix.pipeline.spec.logging import LoggingSpec
from rlix.pipeline.spec.model import quantized
from rlix.pipeline.spec.named import BASES, import_object, is_own, option_problems, where_defined
from rlix.pipeline.spec.runs import run_of
from rlix.pipeline.spec.sections import Sections
from rlix.pipeline.spec.source import (
    AGENT_GIVEN,
    ENVIRONMENT_GIVEN,
    REWARD_GIVEN,
    REWARDS,
    TASK_GIVEN,
    VERIFIERS,
    AgentSpec,
    RewardSpec,
    SourceSpec,
)
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Problem

_TOKENIZERS = ("*token*", "*vocab*", "*merges*", "*.model", "*.tiktoken", "*spiece*")
"""One of these is in any folder with a tokenizer."""
_GIVEN = {REWARD_GIVEN: "prompt, completion and answer", TASK_GIVEN: "one thing (a tokenizer, an Instance)"}


def environment_problems(spec: Sections) -> Iterator[Problem]:
    """Problems that only this machine can show."""
    yield from _source_problems(spec.source)
    if spec.source.conversations is not None:
        pairs = spec.rollout.samples_per_prompt > 1
        yield from conversation_problems("source.conversations", spec.source.conversations, pairs=pairs)
    if spec.warmup is not None and spec.warmup.conversations is not None:
        yield from conversation_problems("warmup.conversations", spec.warmup.conversations, pairs=False)
    elif spec.warmup is not None:
        yield from _warmup(spec.source)
    for where, own in (spec.evaluation.by_field if spec.evaluation else {}).items():
        for problem in _source_problems(own.source) if own.source else ():
            yield Problem(f"{where}.{problem.field}", problem.message)
    if spec.model.kind == "pretrained":
        yield from _model_path(spec.model.path, reads=spec.pipeline is None or spec.multi_lora)
    for field, named in (("pipeline", spec.pipeline), ("algorithm", spec.algorithm), ("schedule", spec.schedule)):
        if named is not None and is_own(named.name):
            yield from _own(field, named.name, named.options)
    yield from backend_problems(spec.rollout.executor, spec.rollout.executor_options, spec.training.executor)
    yield from _loggers(spec.logging)
    if spec.lora is not None and spec.lora.path is not None:
        yield from _adapter(Path(spec.lora.path))
    for name, run in spec.runs.items():
        for problem in environment_problems(run_of(spec, name, run)):
            if problem.field.split(".")[0] in run.model_fields_set:  # else it is the job's, and said
                yield Problem(f"runs.{name}.{problem.field}", problem.message)


def backend_problems(executor: str, options: dict[str, Any], trainer: str) -> Iterator[Problem]:
    """Whether the backends of generation and training are there, and what is wrong with those of the user's own."""
    if executor == "vllm" and find_spec("vllm") is None:
        yield Problem(
            "rollout.executor", "vllm is not installed; run 'pip install rlix[vllm]', or use 'executor: transformers'"
        )
    for field, name, given in (
        ("rollout.executor", executor, own_options(options)),
        ("training.executor", trainer, {}),
    ):
        for problem in _own(field, name, given) if is_own(name) else ():
            where = problem.field.removesuffix(".name").replace(".options", "_options")
            yield Problem(where, problem.message)


def device_problems(spec: Sections, *, virtual: bool) -> Iterator[Problem]:
    """Problems that only the devices can show."""
    if spec.training.attention == "flash_attention_2" and (virtual or find_spec("flash_attn") is None):
        lacking = "GPUs, and these are virtual ones" if virtual else "the package flash-attn; install it"
        yield Problem("training.attention", f"flash_attention_2 needs {lacking}, or use sdpa")


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
        yield from _own("source", source.name, source.options)
    if source.task:
        yield from _own("source.task", source.task.target, source.task.options, TASK_GIVEN)
    if source.environment:
        yield from _own("source.environment", source.environment.target, source.environment.options, ENVIRONMENT_GIVEN)
        yield from _methods("source.environment.name", source.environment.target)
    if source.openai:
        yield from _agent(source.openai)
    if any(reward.name == "math_verify" for reward in source.rewards) and find_spec("math_verify") is None:
        yield Problem("source.rewards", "math_verify needs the package math-verify; run 'pip install rlix[math]'")
        return
    for i, reward in enumerate(source.rewards):
        problems = list(_own(f"source.rewards.{i}", reward.target, reward.options, REWARD_GIVEN, partly=True))
        yield from problems or _reward_columns(f"source.rewards.{i}", reward, source)


def _warmup(source: SourceSpec) -> Iterator[Problem]:
    """Whether there are right answers to learn from; said only of what can be imported."""
    named = source.environment or source.task
    try:
        found: Any = None if named is None else import_object(named.target)
    except SpecError:
        return
    if source.environment and getattr(found, "demonstrate", None) is None:
        yield Problem(
            "warmup",
            f"the environment {source.environment.name} has no 'demonstrate' to learn from; remove this, or give its "
            "class that method",
        )
    base: Any = import_object(BASES["source.task"])
    if source.task and getattr(found, "supervised", None) is base.supervised:
        yield Problem("warmup", f"{source.task.name} has no 'supervised' to learn from; remove this, or write it")


def _agent(agent: AgentSpec) -> Iterator[Problem]:
    """A function is called with a `Call` and the options, a class with the options alone."""
    own, shipped = ("starlette", "uvicorn"), ("openai", "verifiers") if agent.name == VERIFIERS else ()
    if lacks := [name for name in (*own, *shipped) if find_spec(name) is None]:
        with_them = " ".join(("rlix[openai]", *shipped))
        yield Problem("source.openai", f"needs {', '.join(lacks)}; run 'pip install {with_them}'")
    if not is_own(agent.name):
        return
    if problems := list(_own("source.openai", agent.name, {})):
        yield from problems
        return
    found = import_object(agent.name)
    given = 0 if isinstance(found, type) else AGENT_GIVEN
    yield from _own_options("source.openai.options", found, agent.options, given)


def _adapter(folder: Path) -> Iterator[Problem]:
    from rlix.engine.lora import WEIGHTS_FILE, AdapterConfig  # and with it torch

    try:
        AdapterConfig.of_folder(folder)
    except SpecError as error:
        yield Problem("lora.path", str(error))
    else:
        if not (folder / WEIGHTS_FILE).is_file():
            yield Problem("lora.path", f"{folder} is no PEFT adapter: {WEIGHTS_FILE} is missing")


def _model_path(given: str, *, reads: bool) -> Iterator[Problem]:
    """`reads`: whether the job makes tokens of text, for which it needs the folder's tokenizer."""
    path = Path(given)
    if path.is_absolute():
        if not path.is_dir():
            yield Problem(
                "model.path", f"there is no folder {path}; correct the path (it is relative to the job's file)"
            )
        elif not (path / "config.json").is_file():
            yield Problem("model.path", f"{path} holds no config.json, so it is not a saved Hugging Face model")
        elif problem := quantized(path):
            yield Problem("model.path", problem)
        elif reads and not any(True for pattern in _TOKENIZERS for _ in path.glob(pattern)):
            yield Problem(
                "model.path",
                f"{path} holds no tokenizer (no tokenizer.json, say); save it there: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
    elif not is_hub_name(given):
        yield Problem("model.path", f"{given!r} is neither a folder nor a hub name such as 'Qwen/Qwen2.5-0.5B'")


def _own(
    field: str, name: str, options: Mapping[str, Any], given: int = 0, *, partly: bool = False
) -> Iterator[Problem]:
    """Whether `name` can be imported, is what belongs there, and takes the options and `given` things before them. With
    none of those, options go to a class `Options` or nowhere; `partly`: what the options lack comes from elsewhere."""
    try:
        found = import_object(name)
        if isinstance(found, Backend):
            found = found.load()
    except SpecError as error:
        yield Problem(f"{field}.name", str(error))
        return
    base: Any = import_object(BASES[field]) if field in BASES and is_own(name) else None
    at = where_defined(found)
    if not callable(found):
        yield Problem(f"{field}.name", f"{name} is a {type(found).__name__}, not something that can be called")
    elif base is not None and not _derives(found, base, or_makes=given > 0):
        yield Problem(f"{field}.name", f"{name} is not a subclass of {BASES[field].replace(':', '.')}{at}")
    elif inspect.isabstract(found):
        lacks = " and no ".join(sorted(getattr(found, "__abstractmethods__", ())))
        yield Problem(f"{field}.name", f"{name} has no {lacks}; write it{at}")
    elif name not in REWARDS.values() and not _takes(found, given):  # of ours token_match is given tokens
        yield Problem(
            f"{field}.name", f"{name} is called with {_GIVEN[given]}, and does not take as many arguments{at}"
        )
    elif getattr(found, "Options", None) is not None or given:
        yield from _own_options(f"{field}.options", found, options, given, partly=partly)
    elif options:
        yield Problem(
            f"{field}.options", f"{name} has no class 'Options' (a dataclass, say) that says what it takes{at}"
        )


def _own_options(
    field: str, found: object, options: Mapping[str, Any], given: int, *, partly: bool = False
) -> Iterator[Problem]:
    """With where it is said what they should be."""
    at = where_defined(getattr(found, "Options", None)) or where_defined(found)
    for problem in option_problems(field, found, options, given, partly=partly):
        yield Problem(problem.field, f"{problem.message}{at}")


def _derives(found: Any, base: type, *, or_makes: bool) -> bool:
    """`or_makes`: a function that makes one will do."""
    return issubclass(found, base) if isinstance(found, type) else or_makes


def _takes(found: Any, given: int) -> bool:
    try:
        inspect.signature(found).bind_partial(*[None] * given)
    except TypeError:
        return False
    except ValueError:  # a builtin says nothing of what it takes
        return True
    return True


def _methods(field: str, name: str) -> Iterator[Problem]:
    """Whether a class of environments has what they have; said only of what can be imported."""
    try:
        found = import_object(name)
    except SpecError:
        return
    if isinstance(found, type) and (lacks := [m for m in ("reset", "step", "close") if not hasattr(found, m)]):
        yield Problem(
            field,
            f"{name} has no {' and no '.join(lacks)}; an environment has reset, step and close{where_defined(found)}",
        )


def _reward_columns(field: str, reward: RewardSpec, source: SourceSpec) -> Iterator[Problem]:
    """Whether the tables have the columns without which a reward of the user's cannot be called."""
    found: Any = import_object(reward.target)
    try:
        parameters = list(inspect.signature(found).parameters.values())[REWARD_GIVEN:]
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in kinds} - reward.options.keys()
    for _, table in data_fields(source.data) if source.data is not None else ():
        columns = known_columns(table)
        for name in sorted(needed.difference(columns) if columns is not None else ()):
            yield Problem(
                f"{field}.name",
                f"{reward.name} needs {name!r}, which is neither one of its options nor a column of "
                f"{Path(table.path).name} ({', '.join(columns or ())})",
            )
