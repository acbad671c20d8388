"""What Ray's raylet runs to start a worker, in place of Ray's own script, which imports Ray to become another process.

Standard library only: one of these runs for every worker with a runtime environment. What it does not know is left to
Ray's own. It must have that one's name: where there is no such environment, the raylet leaves out what is called so.
"""

import json
import os
import shlex
import sys

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context", "--language"


def main() -> None:
    command = worker_command(sys.argv[1:])
    if command is None:
        from importlib.util import find_spec

        ray = find_spec("ray")  # which is not imported for that
        assert ray is not None
        script = os.path.join(os.path.dirname(ray.origin or ""), "_private", "workers", "setup_worker.py")  # noqa: PTH118, PTH120
        os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])
    variables, line = command
    os.environ.update(variables)
    os.execvp("bash", ["bash", "-c", line])


def worker_command(args: list[str]) -> tuple[dict[str, str], str] | None:
    """The environment variables and the shell's command of a Python worker; None: it is Ray's to know."""
    given = dict(arg.split("=", 1) for arg in args if arg.startswith((f"{_CONTEXT}=", f"{_LANGUAGE}=")))
    context = json.loads(given.get(_CONTEXT) or "{}")
    variables: dict[str, str] = context.get("env_vars") or {}
    odd = context.get("command_prefix") or context.get("override_worker_entrypoint")
    if given.get(_LANGUAGE) != "PYTHON" or odd or any("$" in value for value in variables.values()):
        return None
    own = [shlex.quote(arg) for arg in args if arg.split("=", 1)[0] not in given]
    return variables, " ".join(["exec", context.get("py_executable") or sys.executable, *own])


if __name__ == "__main__":
    main()
