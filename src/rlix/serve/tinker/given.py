"""What is sent as JSON, checked as it is read: what is wrong with it is its client's mistake, and told as one."""

import json
from collections.abc import Mapping
from typing import Any

from rlix.protocol.errors import SpecError

_MOST_SHOWN = 80  # characters of what is wrong


def read_json(body: bytes) -> dict[str, Any]:
    """Raises SpecError: it is no JSON object."""
    try:
        found = json.loads(body or b"{}")
    except ValueError as error:
        raise SpecError(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SpecError("the body must be a JSON object")
    return found


def section(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object in it; empty where there is none. Raises SpecError: it is something else."""
    found = given.get(name)
    if found is not None and not isinstance(found, dict):
        raise SpecError(f"{name} is {repr(found)[:_MOST_SHOWN]}; it must be an object")
    return found or {}


def number(given: Mapping[str, Any], name: str, least: int) -> int:
    """Raises SpecError: it is none, too low, or has more than 64 bits."""
    found = given.get(name)
    if not isinstance(found, int) or not least <= found < 2**63:
        raise SpecError(f"{name} is {repr(found)[:_MOST_SHOWN]}; it must be a whole number from {least}")
    return found
