"""What agents act in: environments, the runners that contain their failures, and the episodes played in them."""

from rlix.pipeline.sources.environments.base import (
    Action,
    Environment,
    EnvironmentFailedError,
    Instance,
    Message,
    Observation,
    ToolCall,
    Transition,
)
from rlix.pipeline.sources.environments.tools import Toolbox, ToolError, ToolResult, as_tool

__all__ = [
    "Action",
    "Environment",
    "EnvironmentFailedError",
    "Instance",
    "Message",
    "Observation",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "Toolbox",
    "Transition",
    "as_tool",
]
