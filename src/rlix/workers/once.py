"""A call that Ray makes again, because a connection was lost, is carried out once: all get what came of it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import Any

CALL = "_rlix_call"
"""The argument that names a call: the same when it is made again."""
_REMEMBERED = 16
"""Calls that have ended; as many as may have run while a connection was away."""


class Answers:
    """What came of the calls of one worker."""

    def __init__(self) -> None:
        self._known: dict[str, Future[Any]] = {}
        self._changing = threading.Lock()

    def of(self, call: str, carry_out: Callable[[], Any]) -> Any:
        """Returns, or raises, what `carry_out` does, or did when this call came first."""
        with self._changing:
            known = self._known.get(call)
            answer = self._known.setdefault(call, Future())
        if known is not None:
            return known.result()
        try:
            answer.set_result(carry_out())
        except BaseException as error:  # noqa: BLE001 - raised below
            answer.set_exception(error)
        with self._changing:
            self._known[call] = self._known.pop(call)  # the last to end is the last to be forgotten
            ended = [name for name, each in self._known.items() if each.done()]
            for name in ended[:-_REMEMBERED]:
                del self._known[name]
        return answer.result()


def once(method: Any) -> Any:
    """The same method, which also takes the name of a call."""

    @wraps(method)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _carried_out(self, method, args, kwargs)

    return named


def _carried_out(worker: Any, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    others = {name: value for name, value in kwargs.items() if name != CALL}
    if CALL not in kwargs:
        return method(worker, *args, **others)
    return worker._rlix_answers.of(kwargs[CALL], lambda: method(worker, *args, **others))
