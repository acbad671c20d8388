"""What a host says of itself."""

from importlib.metadata import PackageNotFoundError

import pytest

from rlix.node import host


def test_a_source_tree_that_was_never_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", nothing_installed)
    assert host.software.__wrapped__().versions["RLix"].startswith("0+unknown (")
