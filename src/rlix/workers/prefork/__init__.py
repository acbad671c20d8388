"""Ray workers forked from a process that has torch and transformers loaded: a fraction of a second each.

    actor = Worker.options(runtime_env=prefork.runtime_env({"NAME": "value"})).remote()

Ray starts each such worker through `launcher.py`, which has `server.py` fork it. The server of a node starts with the
first worker, serves every job of that Ray session, and ends with the raylet. Where it cannot (another platform, a
broken install), the launcher starts the plain interpreter instead.
"""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# Runtime environments that choose an interpreter themselves: ours must not take its place.
_OWN_INTERPRETER = frozenset({"pip", "uv", "conda", "container", "image_uri"})


def runtime_env(env_vars: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The Ray `runtime_env` of a forked worker."""
    launcher = Path(__file__).with_name("launcher.py")
    command = shlex.join([sys.executable, "-S", "-E", str(launcher)])
    return {"py_executable": command, "env_vars": dict(env_vars or {})}


def plain_runtime_env(env_vars: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The Ray `runtime_env` of an ordinary worker, also when asked for by a forked one (Ray passes ours on)."""
    result: dict[str, Any] = {"env_vars": dict(env_vars or {})}
    if "launcher.py" in _current_runtime_env().get("py_executable", ""):
        result["py_executable"] = shlex.quote(sys.executable)
    return result


def available() -> bool:
    """Whether workers of this job may be forked: on Linux, and unless the job brings its own interpreter."""
    return sys.platform == "linux" and not _OWN_INTERPRETER & _current_runtime_env().keys()


def warm(env_vars: Mapping[str, str] | None = None) -> list[ray.ObjectRef[None]]:
    """Start the fork server of every node now, in the background; wait for the result only to know when it is ready.

    `env_vars` should be those of the workers to come: the idle worker this leaves is then the first of them.
    """
    task = ray.remote(_nothing)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return [
        task.options(
            num_cpus=0,
            runtime_env=runtime_env(env_vars),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        ).remote()
        for node in nodes
    ]


def _nothing() -> None:
    return None


def _current_runtime_env() -> dict[str, Any]:
    return dict(ray.get_runtime_context().runtime_env)
