"""How one job's parts are wired: items that stream between them, and plans of where and when they run.

The names of a user's flow are here, and are loaded on first use: the control side imports none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlix.flow.parts.flow_worker import FlowWorker
    from rlix.flow.planner import Mode, make_plan
    from rlix.flow.profiler.measure import Grid, profile
    from rlix.flow.profiler.profile import Profile
    from rlix.flow.programs.flow import Flow
    from rlix.flow.programs.running import Running
    from rlix.flow.programs.wiring import Circle, Part
    from rlix.workers.launch import launch
    from rlix.workers.worker import Worker

_LAZY = {
    "Circle": "rlix.flow.programs.wiring",
    "Flow": "rlix.flow.programs.flow",
    "FlowWorker": "rlix.flow.parts.flow_worker",
    "Grid": "rlix.flow.profiler.measure",
    "Mode": "rlix.flow.planner",
    "Part": "rlix.flow.programs.wiring",
    "Profile": "rlix.flow.profiler.profile",
    "Running": "rlix.flow.programs.running",
    "Worker": "rlix.workers.worker",
    "launch": "rlix.workers.launch",
    "make_plan": "rlix.flow.planner",
    "profile": "rlix.flow.profiler.measure",
}

__all__ = [
    "Circle",
    "Flow",
    "FlowWorker",
    "Grid",
    "Mode",
    "Part",
    "Profile",
    "Running",
    "Worker",
    "launch",
    "make_plan",
    "profile",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rlix.flow' has no attribute {name!r}")
