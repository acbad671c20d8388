"""Which parameters learn at which rate and decay. Pure functions of names and shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from rlix.pipeline.spec.training import OptimizerSpec
from rlix.protocol.errors import SpecError

_MATRIX = 2  # dimensions; what has fewer is a norm's weight or a bias


class Shaped(Protocol):
    def dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Names of parameters, and how they learn; `weight_decay` is AdamW's, decoupled from the gradient."""

    names: tuple[str, ...]
    learning_rate: float
    weight_decay: float


def parameter_groups(parameters: Mapping[str, Shaped], spec: OptimizerSpec) -> list[ParameterGroup]:
    """Those of no pattern first, then each pattern's (the first that a name matches counts).

    Norms and biases do not decay, unless a pattern says how they do. They have a group of their own even where nothing
    decays, so that the groups of a job stay the same when its numbers change.
    """
    patterns = list(spec.groups)
    members: dict[tuple[int, bool], list[str]] = {}
    for name, parameter in parameters.items():
        pattern = next((i for i, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), -1)
        members.setdefault((pattern, parameter.dim() < _MATRIX), []).append(name)
    return [_group(spec, patterns, key, names) for key, names in sorted(members.items())]


def check_patterns(names: Sequence[str], spec: OptimizerSpec) -> None:
    """Raises SpecError when there is a pattern for nothing."""
    for pattern in spec.groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:3])
            raise SpecError(f"optimizer.groups: no parameter is called {pattern!r}; names are like {some}")


def _group(spec: OptimizerSpec, patterns: list[str], key: tuple[int, bool], names: list[str]) -> ParameterGroup:
    pattern, small = key
    own = None if pattern < 0 else spec.groups[patterns[pattern]]
    rate = spec.learning_rate if own is None or own.learning_rate is None else own.learning_rate
    decay = 0.0 if small else spec.weight_decay
    if own is not None and own.weight_decay is not None:
        decay = own.weight_decay
    return ParameterGroup(tuple(names), rate, decay)
