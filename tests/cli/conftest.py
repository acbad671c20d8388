"""Fixtures of the tests that run `rlix`."""

from collections.abc import Iterator

import pytest

from tests.cli.commands import Command


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        for process in command.marked():
            process.kill()
