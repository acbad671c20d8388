"""Keys that job specs no longer have, and what to write instead."""

_OPTIONS = (
    "clip_low",
    "clip_high",
    "kl_coefficient",
    "kl_estimator",
    "normalize_by_std",
    "aggregation",
    "discount",
    "smoothing",
)
_MOVED = {
    "task": "is part of 'source' now; write 'source: {task: {name: sort_digits, options: {digits: 4}}}'",
    "data": "is part of 'source' now; write 'source: {data: {path: ...}, rewards: [exact_match]}'",
    "reward": "is part of 'source' now, as a list; write e.g. 'source: {data: ..., rewards: [exact_match]}'",
    "environment": "is part of 'source' now; write 'source: {environment: {name: digit_lookup, ...}}'",
    "asynchronous": "is a schedule now; write 'schedule: {name: ahead, options: {max_staleness: 1}}'",
    "critic": "is an option of ppo now; write 'algorithm: {name: ppo, options: {critic: {learning_rate: 1e-5}}}'",
    "source.environment.factory": "is the name now; write 'name: my_environment.py:MyEnvironment'",
    "source.reward": "is a list now; write 'rewards: [exact_match]'",
    "algorithm.normalize_by_std": "is an option now; write it under 'algorithm.options', or use 'name: dr_grpo'",
    "schedule.options.importance_cap": "belongs to any schedule now; write 'algorithm: {importance_cap: 2.0}'",
}
_PLANNED = ("plan.chosen", "plan.step_s", "plan.load_s", "plan.seconds")


def moved(dotted: str) -> str | None:
    """What to write instead of an unknown key, when it is one that there was."""
    if dotted in _MOVED:
        return _MOVED[dotted]
    if dotted in _PLANNED:
        return "was written by RLix, beside the clusters that it planned; remove 'plan' to run on these clusters"
    section, _, key = dotted.rpartition(".")
    if section == "algorithm" and key in _OPTIONS:
        return "is an option of the algorithm now; write it under 'algorithm.options'"
    return None
