"""What a job names: something that ships with RLix, or a user's own as `file.py:name` or `package.module:name`."""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, create_model
from pydantic_core import InitErrorDetails

from rlix.pipeline.spec.section import Section
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Problem, nearest, problems_of

_LIBRARIES = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_NOT_OWN = ("<", str(Path(__file__).parents[2]), *_LIBRARIES)  # how names of files begin that no user wrote
BASES = {
    "pipeline": "rlix.pipeline:Pipeline",
    "rollout.executor": "rlix.engine.executors.base:InferenceExecutor",
    "training.executor": "rlix.engine.train.executor:TrainExecutor",
    "algorithm": "rlix.pipeline.algorithms:Algorithm",
    "schedule": "rlix.pipeline.schedules:Schedule",
    "source": "rlix.pipeline.sources:Source",
    "source.task": "rlix.pipeline.sources.tasks:Task",
}
"""What something of the user's derives from, by the section that names it."""
_FORMS = "file.py:name or package.module:name"
_loading = threading.RLock()  # runs of a job may name the same file at the same time


class Named(Section):
    """Something that is called by name, with options of its own. A bare name is the same without options."""

    bare = "name"

    name: str
    """What ships with RLix, or your own: `file.py:name` (relative to the job's file) or `package.module:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Checked by what is named."""


def is_own(name: str) -> bool:
    """Whether `name` says where something of the user's is."""
    return ":" in name


def unknown_name(field: str, name: str, shipped: Iterable[str]) -> Iterator[Problem]:
    """A problem when `name` neither ships nor has the form of something of the user's."""
    names = list(shipped)
    if name not in names and not is_own(name):
        yield Problem(field, f"must be {', '.join([*names, ''])}{_FORMS}, not {name!r}{nearest(name, names)}")


def import_object(name: str) -> object:
    """The object behind `file.py:name` or `package.module:name`. Raises SpecError saying what could not be found."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise SpecError(f"{name!r} is not of the form {_FORMS}")
    if module_name.endswith(".py"):
        with _loading:
            module = _load_file(Path(module_name))
    else:
        module = load_module(module_name)
    try:
        found: object = getattr(module, attribute)
    except AttributeError:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise SpecError(f"module {module_name!r} has no {attribute!r}{nearest(attribute, public)}") from None
    return found


def shipped_or_own(name: str) -> Any:
    """The object behind the name of something of the user's; of what ships the name itself."""
    return import_object(name) if is_own(name) else name


def import_class(section: str, name: str) -> Any:
    """The class of a user's that a section names. Raises SpecError when there is none, or it is of another kind."""
    found, base = import_object(name), cast(type, import_object(BASES[section]))
    if not (isinstance(found, type) and issubclass(found, base)):
        raise SpecError(f"{section}.name: {name!r} is not a subclass of {BASES[section].replace(':', '.')}")
    return found


def load_module(name: str) -> ModuleType:
    """Raises SpecError when it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpecError(
            f"module {name!r} cannot be imported ({error}); install it, or put its folder on PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise SpecError(f"module {name!r} cannot be imported: {where_raised(error)}") from error


def _load_file(path: Path) -> ModuleType:
    """The module in a file, loaded once; its objects travel to other processes whole, which need not have the file."""
    path = path.absolute()
    name = f"rlix_file_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        beside = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise SpecError(f"there is no file {path}{nearest(str(path), beside)}")
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything while it is imported
        del sys.modules[name]
        raise SpecError(f"{path} cannot be imported: {where_raised(error)}") from error
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module


def where_raised(error: BaseException) -> str:
    """The error, and the file and line of the user's code that raised it, or called what did."""
    text = f"{type(error).__name__}: {error}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_OWN)]
    if not own or isinstance(error, SyntaxError):  # the latter says where itself
        return text
    return f"{text} ({own[-1].filename}:{own[-1].lineno})"


def where_defined(found: object) -> str:
    """ " (file:line)", of a class or function that a user wrote; "" of any other, and where it cannot be known."""
    try:
        file, line = inspect.getsourcefile(cast(Any, found)), inspect.getsourcelines(cast(Any, found))[1]
    except (TypeError, OSError):
        return ""
    return "" if file is None or file.startswith(_NOT_OWN) else f" ({file}:{line})"


def where_now(thread: int) -> str:
    """The line of the user's code at which a thread is, or that called what it is in; of any code, without such."""
    if (frame := sys._current_frames().get(thread)) is None:
        return "an unknown line: its thread has ended"
    stack = traceback.extract_stack(frame)
    own = [frame for frame in stack if not frame.filename.startswith(_NOT_OWN)]
    at = (own or stack)[-1]
    return f"{at.filename}:{at.lineno}, in {at.name}"


def own_traceback(error: BaseException) -> str:
    """The traceback as far as it runs through the user's code, with its lines; empty when it does not."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_OWN)]
    return "".join(traceback.format_list(own))


class Shipped:
    """What ships, as far as its options go: looking at them loads none of its code."""

    def __init__(self, options: type) -> None:
        self.Options = options


# ---- options ---------------------------------------------------------------------------------------------------------


def parse_options(found: object, options: Mapping[str, Any], given: int = 0) -> Any:
    """`options` as what is named takes them, checked.

    Something with a class attribute `Options` (a pydantic model or a dataclass) gets one of those; anything else that
    can be called gets keyword arguments, a dictionary, checked against its signature, of whose positional parameters
    the first `given` are not options.

    Raises:
        pydantic.ValidationError: they do not fit.
    """
    declared = getattr(found, "Options", None)
    if declared is not None:
        _refuse_unknown(declared, options)
        return _validated(TypeAdapter(declared), options)
    model = _model_of_signature(cast(Callable[..., Any], found), given)
    if model is None:
        return dict(options)
    values = _validated(TypeAdapter(model), options)
    return {key: getattr(values, key) for key in options}


def options_of(found: Any, options: Mapping[str, Any]) -> Any:
    """`options` as its class `Options` has them; without one as they are."""
    return dict(options) if getattr(found, "Options", None) is None else parse_options(found, options)


def option_problems(
    field: str, found: object, options: Mapping[str, Any], given: int = 0, *, partly: bool = False
) -> Iterator[Problem]:
    """What is wrong with the options of what is named, each by its field; with `partly`, none can be missing."""
    try:
        parse_options(found, options, given)
    except ValidationError as error:
        declared = getattr(found, "Options", None)
        is_model = isinstance(declared, type) and issubclass(declared, BaseModel)
        model = declared if is_model else _model_of_fields(found, declared, given)
        found_errors = [e for e in error.errors() if not (partly and e["type"] == "missing")]
        for problem in problems_of(found_errors, cast(type[BaseModel], model), options):
            yield Problem(f"{field}.{problem.field}" if problem.field else field, problem.message)
    except TypeError as error:
        yield Problem(field, f"do not fit: {error}")


def _validated(adapter: "TypeAdapter[Any]", options: Mapping[str, Any]) -> Any:
    # JSON mode is strict about types, yet takes a list for a tuple as YAML must.
    return adapter.validate_json(json.dumps(dict(options), default=str), strict=True)


def _refuse_unknown(declared: Any, options: Mapping[str, Any]) -> None:
    """A user's model or dataclass need not say that it takes nothing else: like every section of a job, it does not."""
    if dataclasses.is_dataclass(declared):
        known = {f.name for f in dataclasses.fields(declared)}
    elif declared.model_config.get("extra") != "allow":
        known = set(declared.model_fields)
    else:
        return
    errors = [
        InitErrorDetails(type="extra_forbidden", loc=(key,), input=value)
        for key, value in options.items()
        if key not in known
    ]
    if errors:
        raise ValidationError.from_exception_data("Options", errors)


def _model_of_fields(found: object, declared: Any, given: int) -> type[BaseModel]:
    """For messages: the names that are known."""
    if declared is None:
        return _model_of_signature(cast(Callable[..., Any], found), given) or BaseModel
    names: Any = {f.name: (Any, None) for f in dataclasses.fields(declared)}
    return cast(type[BaseModel], create_model("Options", **names))


def _model_of_signature(found: Callable[..., Any], given: int) -> type[BaseModel] | None:
    """A model of the keyword arguments; None where the signature says nothing."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return None
    fields: dict[str, Any] = {}
    takes_any = False
    for position, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif position >= given and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (_annotation(found, parameter), default)
    config: Any = ConfigDict(
        extra="allow" if takes_any else "forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )
    try:
        return cast(type[BaseModel], create_model("Options", __config__=config, **fields))
    except (PydanticUserError, NameError, TypeError):  # annotations that pydantic does not understand are not checked
        untyped: Any = {name: (Any, default) for name, (_, default) in fields.items()}
        return cast(type[BaseModel], create_model("Options", __config__=config, **untyped))


def _annotation(found: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    if isinstance(annotation, str):
        target = found.__init__ if isinstance(found, type) else found  # type: ignore[misc]
        try:
            return eval(annotation, getattr(target, "__globals__", {}))
        except (NameError, SyntaxError, AttributeError, TypeError):
            return Any
    return annotation
