"""Whether an answer is mathematically equal to the right one: numbers, fractions, sets, expressions, LaTeX or not."""

import logging

from rlix.pipeline.sources.rewards import Reward

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limits: ours hold


def math_verify(prompt: str, completion: str, answer: str) -> Reward:
    """1 when the completion's last answer (in a box, if it has one) equals `answer`; the package math-verify decides.

    It runs in a process of its own, within the reward's `timeout_s`: some expressions take for ever to simplify.
    """
    from math_verify import parse, verify

    # Without their own time limits, which want to be signals of a main thread, and swallow what they end.
    wanted = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    found = parse(completion, parsing_timeout=None)
    exact = bool(verify(wanted, found, timeout_seconds=None))
    said = wanted if exact else found  # 0.5 and 1/2 are one answer
    return Reward(float(exact), exact, answer=str(said[0]) if said else None)
