"""The judge of `benchmarks.judging`, in a file that imports little, as processes of rewards load it."""

import asyncio


async def judge(prompt: str, completion: str, answer: str, *, seconds: float) -> float:
    """As one that asks over a network: it waits."""
    await asyncio.sleep(seconds)
    return float(len(completion))
