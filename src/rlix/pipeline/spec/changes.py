"""What is different between the spec that a run began with and the one that it is to go on with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlix.pipeline.spec.sections import Sections

_APPLIED = (
    "algorithm",
    "checkpoint",
    "clusters",
    "declared_speed",
    "evaluation",
    "logging",
    "model.dtype",
    "optimizer",
    "pipeline.options",
    "plan",
    "rollout",
    "runs",  # each of which is looked at as it begins
    "schedule",
    "seed",
    "source",
    "steps",
    "training",
)
"""Fields, and sections with all that is in them, that the steps to come can follow; what is not listed is refused."""
_OVER = ("warmup",)
_PART_OF_STATE = "is part of what the checkpoint holds"


@dataclass(frozen=True, slots=True)
class Change:
    """A dotted field, its value then and now (None: not given). `refused`: why it cannot be; `note`: what to know."""

    field: str
    old: Any
    new: Any
    refused: str = ""
    note: str = ""


def spec_changes(old: Sections, new: Sections) -> list[Change]:
    """Field by field, in the order of the spec."""
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    fields = list(dict.fromkeys([*after, *before]))
    planned = ("clusters", "plan") if new.is_unplanned else ()  # nobody knows yet
    changed = [field for field in fields if before.get(field) != after.get(field) and not _in(field, planned)]
    missing = _missing_state(old, new)
    return [_change(field, before.get(field), after.get(field), missing) for field in changed]


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted names. A section that is empty or not there has none."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def _change(field: str, old: Any, new: Any, missing: str) -> Change:
    if _in(field, ("optimizer.groups",)) and None in (old, new):
        return Change(field, old, new, refused=f"which parameters belong together {_PART_OF_STATE}")
    if missing and _in(field, ("algorithm",)):
        return Change(field, old, new, refused=missing)
    if _in(field, _APPLIED):
        return Change(field, old, new)
    if _in(field, _OVER):
        return Change(field, old, new, note="without effect: it comes before the first step")
    return Change(field, old, new, refused=_PART_OF_STATE)


def _missing_state(old: Sections, new: Sections) -> str:
    """What the algorithm would go on from and the run has not kept; "" when it has everything."""
    before, after = (job.algorithm.needs(off_policy=False) for job in (old, new))
    if after.critic is not None and before.critic is None:
        return "the run has no critic to go on with"
    if after.starting_policy and not before.starting_policy:
        return "the run has not kept the policy as it was before reinforcement learning"
    return ""


def _in(field: str, sections: tuple[str, ...]) -> bool:
    return any(field == section or field.startswith(f"{section}.") for section in sections)
