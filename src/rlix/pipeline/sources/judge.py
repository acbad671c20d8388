"""What rewards say of a completion: a reward, or why there is none. A failing one costs its sample, never the job."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from rlix.pipeline.sources.rewards import Reward, as_reward
from rlix.pipeline.spec.named import own_traceback, where_raised

logger = logging.getLogger(__name__)

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
