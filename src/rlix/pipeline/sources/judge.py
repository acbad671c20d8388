"""What rewards say of a completion: a reward, or why there is none. A failing one costs its sample, never the job."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from rlix.pipeline.sources.rewards import Reward, as_reward
from rlix.pipeline.spec.named import own_traceback, where_raised

logger = logging.getLogger(__name__)

_LOOKED_AT = 16  # calls
_LONG_S = 0.1
_IDLE = 0.2
_SHOWN = 3
_WARNED = 8
_LONGEST = 2000  # characters of a text in the log
_EXCERPT = 60  # and in a message

Verdict = Reward | str
"""A reward, or why there is none."""


class Failures:
    """Says failures in the log, the first few of each reward with what was judged and the user's own traceback; on the
    terminal, which one that fails for every sample would fill, only the first."""

    def __init__(self) -> None:
        self._shown: Counter[str] = Counter()

    def note(self, reward: str, reason: str, asked: Mapping[str, str], trace: str) -> str:
        """The reason, with what was judged. `asked`: the sample, in words."""
        if "completion" in asked:
            reason = f"{reason}; it judged {shortened(asked['completion'])!r}"
        self._shown[reward] += 1
        logger.log(logging.WARNING if self._shown[reward] <= _WARNED else logging.INFO, "%s", reason)
        if self._shown[reward] == _WARNED:
            logger.warning("%s: further failures are said in job.log only; reward_failed counts them", reward)
        if self._shown[reward] <= _SHOWN and (asked or trace):
            sample = "".join(f"\n  {name}: {value[:_LONGEST]!r}" for name, value in asked.items())
            logger.info("%s%s\n%s", reason, sample, trace)
        return reason


FAILURES = Failures()


class Waiting:
    """Whether calls of a plain function, `at_once` of which run at a time, wait for something, such as a judge that is
    asked over a network: more at a time would be sooner done."""

    def __init__(self, reward: str, at_once: int) -> None:
        self._reward, self._at_once = reward, at_once
        self._calls, self._seconds, self._worked_s = 0, 0.0, 0.0

    def note(self, seconds: float, worked_s: float) -> str:
        """A call that others wait for. Returns what to say once, "" otherwise."""
        if self._calls == _LOOKED_AT:
            return ""
        self._calls += 1
        self._seconds += seconds
        self._worked_s += worked_s
        mean_s = self._seconds / self._calls
        if self._calls < _LOOKED_AT or mean_s < _LONG_S or self._worked_s > _IDLE * self._seconds:
            return ""
        return (
            f"reward {self._reward}: its calls take {mean_s:.2g} s, of which {self._worked_s / self._calls:.2g} s are "
            f"work, and {self._at_once} run at a time: 1,000 take {1000 * mean_s / self._at_once:.0f} s. Make it an "
            "`async def` (64 at a time, in one process), or raise the reward's `concurrency` (a process each)"
        )


def shortened(text: str) -> str:
    """As much of a text as a message has room for."""
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]} ..."


def attempted(source: str, call: Callable[[], float | Reward]) -> Verdict:
    """What `call` returns, checked; or that it failed, with the place in the user's code. `source` names the reward."""
    try:
        return as_reward(call(), source)
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything; it costs this sample only
        reason = f"{source} failed: {where_raised(error)}"
        return FAILURES.note(source.partition(" for ")[0], reason, {}, own_traceback(error))
