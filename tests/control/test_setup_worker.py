"""How a worker starts in its runtime environment, without Ray's own script."""

import json

import pytest

from rlix.control.setup_worker import worker_command

ARGS = ["default_worker.py", "--node-ip-address=127.0.0.1", "--name=a b"]


def command(language: str = "PYTHON", **context: object) -> tuple[dict[str, str], str] | None:
    given = [f"--serialized-runtime-env-context={json.dumps(context)}", f"--language={language}"]
    return worker_command([*ARGS, *given, "--startup-token=3"])


def test_it_becomes_the_interpreter_of_the_environment() -> None:
    found = command(py_executable="python -S launcher.py", env_vars={"A": "1"}, command_prefix=[])
    line = "exec python -S launcher.py default_worker.py --node-ip-address=127.0.0.1 '--name=a b' --startup-token=3"
    assert found == ({"A": "1"}, line)


@pytest.mark.parametrize("odd", [{"command_prefix": ["x"]}, {"env_vars": {"A": "${B}"}}, {"language": "JAVA"}])
def test_what_is_rays_to_know_is_left_to_it(odd: dict[str, object]) -> None:
    assert command(**odd) is None  # type: ignore[arg-type]
