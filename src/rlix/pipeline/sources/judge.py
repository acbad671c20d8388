"""What rewards say of a completion: a reward, or why there is none. A failing one costs its sample, never the job."""

import logging
from collections.abc import Callable

from rlix.pipeline.sources.rewards import Reward, as_reward
from rlix.pipeline.spec.named import where_raised

logger = logging.getLogger(__name__)

Verdict = Reward | str
"""A reward, or why there is none."""


def attempted(source: str, call: Callable[[], float | Reward]) -> Verdict:
    """What `call` returns, checked; or that it failed, with the place in the user's code. `source` names the reward."""
    try:
        return as_reward(call(), source)
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything; it costs this sample only
        return noted(f"{source} failed: {where_raised(error)}")


def noted(reason: str) -> str:
    """The reason, said in the log."""
    logger.warning("%s", reason)
    return reason
