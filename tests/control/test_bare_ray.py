"""What is left out of a Ray that is started here, as far as this Ray has it."""

import pytest
import ray
from ray._private import services
from ray._private.node import Node

from rlix.control.init import _bare, _try_to_start
from rlix.protocol.errors import RlixError


@pytest.mark.parametrize("renamed", [(), ((Node, "start_monitor"), (services, "start_raylet"))])
def test_what_this_ray_calls_otherwise_is_started_with_it(
    renamed: tuple[tuple[object, str], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in renamed:
        monkeypatch.delattr(owner, name)
    before = dict(vars(services)), dict(vars(Node))
    with _bare():
        assert services.start_api_server(False, raise_on_failure=False) == ("", None)
        assert hasattr(Node, "start_monitor") == (not renamed)
    assert (dict(vars(services)), dict(vars(Node))) == before


def test_a_ray_that_never_starts_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts the second time is in `test_lifecycle.py`."""
    tries: list[str] = []

    def never(**options: str) -> None:
        tries.append(options["address"])
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 (as Ray does)

    monkeypatch.setattr(ray, "init", never)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(RlixError, match=r"^rlix\.init: Ray did not start \(3 tries\): The current node timed out"):
        _try_to_start({"address": "local"})
    assert tries == ["local"] * 3
