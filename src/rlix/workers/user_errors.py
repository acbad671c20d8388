"""Errors of a worker's methods, as the caller gets them: what the method raised, and a `WorkerError`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from rlix.control.rpc import in_words
from rlix.protocol.errors import RlixError, SpecError, WorkerError


def failure(group: str, rank: int, method: str, error: BaseException) -> WorkerError:
    """The error of a rank's method, from what Ray raises for it."""
    if isinstance(error, ActorDiedError) and method != "__init__":  # of a start Ray knows more than this
        return WorkerError(f"{group}: rank {rank} died before it answered {method}(): {in_words(error)}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    cause = error if cause is None else cause
    return worker_error(f"{group}: rank {rank} failed in {method}(): {type(cause).__name__}: {cause}", rank, cause)


@contextmanager
def sent(where: str, values: Iterable[tuple[str, object]]) -> Iterator[None]:
    """Raise SpecError in place of Ray's pages about a value that cannot be sent: which of the named `values` it is."""
    try:
        yield
    except TypeError as error:
        if "Could not serialize" not in str(error):
            raise
        for name, value in values:
            try:
                cloudpickle.dumps(value)
            except Exception as why:  # noqa: BLE001 (whatever a class of its user raises)
                raise SpecError(f"{where}: {name} cannot be sent to workers: {type(why).__name__}: {why}") from None
        raise


def worker_error(message: str, rank: int, cause: BaseException) -> WorkerError:
    """An error that is caught as `WorkerError` and as the cause's own type, and has the cause's attributes."""
    own = isinstance(cause, Exception) and not isinstance(cause, RlixError | RayError)
    return _made(type(cause) if own else WorkerError, message, {**(cause.__dict__ if own else {}), "rank": rank})


def _made(kind: Any, message: str, attributes: dict[str, object]) -> WorkerError:
    """Without `__init__`, which may want other arguments than a message."""
    both = WorkerError if kind is WorkerError else _both(kind)
    built_in: Any = next(base for base in both.__mro__[1:] if base.__module__ == "builtins" and issubclass(kind, base))
    error: WorkerError = built_in.__new__(both, message)
    error.args = (message,)
    error.__dict__.update(attributes)
    return error


@cache
def _both(kind: Any) -> type[WorkerError]:
    def text(error: Exception) -> str:  # KeyError's own would be in quotes, others have none of their own
        return str(error.args[0])

    def reduce(error: Exception) -> tuple[object, ...]:
        return _made, (kind, error.args[0], error.__dict__)

    members = {"__str__": text, "__reduce__": reduce, "__module__": kind.__module__, "__init__": Exception.__init__}
    try:
        return type(kind.__name__, (WorkerError, kind), members)
    except TypeError:  # a class that cannot be extended, or not together with another
        return WorkerError
