"""Many lives, on every core: what was wrong in any, and how to see it again."""

import logging
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from benchmarks.faults.virtual.faults import Kind, draws, live, name
from benchmarks.faults.virtual.life import Verdict

_MOST_SHOWN = 40


def one(drawn: tuple[int, tuple[Kind, ...]]) -> Verdict:
    logging.getLogger("rlix").setLevel(logging.CRITICAL)
    logging.getLogger("rlix").propagate = False
    return live(*drawn)


def campaign(count: int, seed: int, only: str = "") -> int:
    """Lives `count` lives; returns 1 when anything was wrong. `only`: those with a fault whose name holds this word."""
    began = time.monotonic()
    drawn = [each for each in draws(count, seed) if only in name(each[1])]
    kinds = Counter(kind.__name__ for _, faults in drawn for kind in faults)
    wrong, verdicts = 0, []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (its_seed, faults), verdict in zip(drawn, pool.map(one, drawn, chunksize=4), strict=True):
            verdicts.append(verdict)
            wrong += bool(verdict.wrong)
            if verdict.wrong and wrong <= _MOST_SHOWN:
                print(f"{name(faults)} (seed {its_seed})", *verdict.wrong, sep="\n    ", flush=True)
    print("\n| fault | injected |\n|---|--:|")
    for kind, number in sorted(kinds.items()):
        print(f"| {kind.replace('_', ' ')} | {number} |")
    print(f"\n{len(drawn)} lives, {sum(v.faults for v in verdicts)} faults, {sum(v.events for v in verdicts)} events, ")
    print(
        f"{sum(v.crashes for v in verdicts)} ends of the scheduler, {sum(v.killed for v in verdicts)} processes ended,"
    )
    print(f"{sum(v.virtual_s for v in verdicts) / 3600:.1f} virtual hours in {time.monotonic() - began:.0f} s;")
    print(f"longest wait of a gang {max(v.longest_wait_s for v in verdicts):.0f} s; {wrong} lives went wrong")
    return int(wrong > 0)
