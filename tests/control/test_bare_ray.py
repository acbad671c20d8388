"""What is left out of a Ray that is started here, as far as this Ray has it."""

import pytest
from ray._private import services
from ray._private.node import Node

from rlix.control.init import _bare


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
