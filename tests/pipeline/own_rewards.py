"""Rewards that a user might write; they run in processes of their own."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlix.pipeline.sources.rewards import Reward


def length(prompt: str, completion: str, answer: str) -> float:
    sys.stdout.write("this must not get among the answers\n")
    return float(len(completion))


def told(prompt: str, completion: str, answer: str, *, level: int, factor: float = 1.0) -> float:
    return level * factor


def any_columns(prompt: str, completion: str, answer: str, **columns: Any) -> float:
    return float(len(columns))


def moody(prompt: str, completion: str, answer: str, mood: str) -> Any:
    match mood:
        case "hang":
            time.sleep(600)
        case "raise":
            raise KeyError(completion)
        case "die":
            os._exit(3)
        case "nothing":
            return None
        case "text":
            return "1.0"
        case "endless":
            return float("inf")
        case "exit":
            sys.exit(4)
        case "numpy":
            return Reward(np.float32(0.5), np.bool_(True))  # type: ignore[arg-type]
        case "meet":  # ends when three are there at a time
            here = Path(answer)
            (here / completion).touch()
            while len(list(here.iterdir())) < 3:
                time.sleep(0.01)
    return 1.0


_here: list[str] = []
_all_here = asyncio.Event()


async def together(prompt: str, completion: str, answer: str, count: int) -> float:
    """Ends when `count` wait at a time."""
    _here.append(completion)
    if len(_here) == count:
        _all_here.set()
    await _all_here.wait()
    return float(os.getpid())


async def slow(prompt: str, completion: str, answer: str, mood: str) -> float:
    if mood == "late":
        await asyncio.sleep(600)
    if mood == "raise":
        raise ValueError(mood)
    return 1.0


def rank(prompt: str, completions: list[str], answer: str, base: float) -> list[float]:
    ordered = sorted(completions, key=len)
    return [base + ordered.index(completion) for completion in completions]


def too_few(prompt: str, completions: list[str], answer: str) -> list[float]:
    return [1.0]
