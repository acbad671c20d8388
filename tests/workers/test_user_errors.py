"""What a worker's method raised, as the caller gets it."""

import pickle

import pytest

from rlix.protocol.errors import NotResidentError, WorkerError
from rlix.workers.user_errors import worker_error


class OddError(Exception):
    """Wants more than a message."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"{reason} at {index}")
        self.index = index


@pytest.mark.parametrize(
    "cause",
    [ValueError("x"), KeyError("x"), OSError(2, "x"), UnicodeDecodeError("utf-8", b"x", 0, 1, "x"), OddError(3, "x")],
)
def test_an_error_keeps_its_type_and_is_a_worker_error(cause: Exception) -> None:
    error = worker_error("echo: rank 1 failed: x", 1, cause)
    assert isinstance(error, WorkerError) and isinstance(error, type(cause))
    assert (str(error), error.rank, type(error).__name__) == ("echo: rank 1 failed: x", 1, type(cause).__name__)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, type(cause)) and (str(again), again.rank) == (str(error), 1)


def test_attributes_survive_and_what_is_no_users_error_is_a_plain_worker_error() -> None:
    assert worker_error("failed", 0, OddError(3, "x")).index == 3
    assert type(worker_error("failed", 0, NotResidentError("x"))) is WorkerError
    assert type(worker_error("failed", 0, KeyboardInterrupt())) is WorkerError
