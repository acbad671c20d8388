"""Answers that are no protobuf."""

import json
from typing import Any, Literal

JSON, PROTOBUF = "application/json", "application/x-protobuf"
Category = Literal["user", "server", "unknown"]


def answer(**fields: Any) -> tuple[str, bytes]:
    return JSON, json.dumps(fields).encode()


def failure(error: str, category: Category) -> tuple[str, bytes]:
    """What the client raises: in the body, for it tries again for ever what has a status of 500."""
    return answer(error=error, category=category)
