"""What agents act in: environments, the runners that contain their failures, and the episodes played in them."""

from rlix.pipeline.sources.environments.base import (
    Action,
    Environment,
    EnvironmentFailedError,
    Instance,
    Observation,
    Transition,
)
from rlix.pipeline.sources.environments.tools import Toolbox, ToolCall, ToolResult

__all__ = [
    "Action",
    "Environment",
    "EnvironmentFailedError",
    "Instance",
    "Observation",
    "ToolCall",
    "ToolResult",
    "Toolbox",
    "Transition",
]
