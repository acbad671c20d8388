"""One row of metrics from those of several optimizer steps."""

from collections.abc import Mapping, Sequence

SKIPPED = "skipped_updates"
LATE = "late_s"  # by how much passes took longer than declared
TOKENS = "update_tokens"
MOST = "_max"  # the largest of all tokens of all updates, where others are means


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it, weighted by their tokens; of what adds up, the sum, and of
    what is called `_max` the largest.

    A loss of 0 when there was nothing to learn from.
    """
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update if name != TOKENS):
        having = [update for update in updates if name in update]
        if name.endswith((SKIPPED, LATE)):
            result[name] = sum(update[name] for update in having)
        elif name.endswith(MOST):
            result[name] = max(update[name] for update in having)
        else:
            weights = [update.get(TOKENS, 1.0) for update in having]
            weighted = sum(update[name] * weight for update, weight in zip(having, weights, strict=True))
            result[name] = weighted / sum(weights)
    return {"loss": 0.0} if not updates else result
