"""What slow rewards add to a step: seconds from its last token to its last reward.

    python -m benchmarks.judging [--samples N] [--judge-s S] [--rollout-s S] [--concurrency N] [--json]

The source, its rewards and their processes are real; tokens come at a declared speed, on 8 replicas that decode
everything at once. Answers have lognormal lengths (sigma 0.8) that are cut where the rollout ends. The reward is an
`async def` that waits, as one does that asks a judge over a network.
"""

import argparse
import heapq
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlix.engine.declared import DeclaredSpeed
from rlix.pipeline.ends import Ends
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.sources.base import Surroundings
from rlix.pipeline.sources.data import DataTask
from rlix.pipeline.sources.prompts import PromptSource
from rlix.pipeline.spec.source import DataSpec, RewardSpec
from rlix.pipeline.tokenizer import character_tokenizer
from rlix.protocol.messages import Demand

REPLICAS, GROUP, SIGMA = 8, 8, 0.8
SPEED = DeclaredSpeed(token_ms=10.0, kv_us=40.0)


class Declared:
    """Ends each trajectory when its last token is due."""

    def __init__(self, longest: int, token_s: float) -> None:
        self._longest, self._token_s = longest, token_s
        self._due: list[tuple[float, int, Future[Trajectory], Trajectory]] = []
        self._changed = threading.Condition()
        self.lengths: list[int] = []
        threading.Thread(target=self._end, daemon=True).start()

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]":
        now, asked = time.monotonic(), []
        with self._changed:
            for trajectory in trajectories:
                draw = random.Random(trajectory.seed).lognormvariate(0.0, SIGMA)
                length = max(1, min(self._longest, round(self._longest / 6 * draw)))
                self.lengths.append(length)
                asked.append(Future[Trajectory]())
                heapq.heappush(self._due, (now + length * self._token_s, len(self.lengths), asked[-1], trajectory))
            self._changed.notify()
        return asked

    def _end(self) -> None:
        while True:
            with self._changed:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                _, number, done, trajectory = heapq.heappop(self._due)
            length = self.lengths[number - 1]
            trajectory.token_ids, trajectory.logprobs = [5] * length, [-1.0] * length
            trajectory.versions, trajectory.finish_reason = [0] * length, "stop"
            done.set_result(trajectory)

    @property
    def devices_s(self) -> float:
        return time.monotonic()

    def expect(self, demand: Demand, purpose: str = "") -> None: ...

    def abandon(self, reason: Exception, purpose: str | None = "") -> None: ...


def measure(samples: int, judge_s: float, rollout_s: float, concurrency: int) -> dict[str, Any]:
    tokenizer = character_tokenizer("0123456789>")
    rewards = [RewardSpec(name="benchmarks.judge:judge", options={"seconds": judge_s}, concurrency=concurrency)]
    token_s = SPEED.decode_s(samples // REPLICAS, 0)
    longest = round(rollout_s / token_s)
    rollouts = Declared(longest, token_s)
    rows = [{"prompt": f"{number}>", "answer": "1"} for number in range(samples // GROUP)]
    task = DataTask(DataSpec(path="rows"), [rows], rewards, tokenizer, group_size=GROUP)
    source = PromptSource(
        task,
        Surroundings(
            job="judging",
            seed=0,
            groups=samples // GROUP,
            group_size=GROUP,
            sampling=Sampling(longest),
            context=2 * longest,
            tokenizer=tokenizer,
            ends=Ends(tokenizer, Path(tempfile.gettempdir())),
            timeout_s=3600.0,
            stop=threading.Event(),
            generator=lambda: rollouts,
        ),
    )
    try:
        curves = source.finish(source.begin(0)).curves
    finally:
        source.close()
    return {
        "samples": samples,
        "rollout_s": round(curves["rollout_s"], 2),
        "added_s": round(curves["reward_s"], 2),
        "in_turn_s": round(samples * judge_s / concurrency, 2),
        "failed": int(curves["reward_failed"]),
        "tokens_median": sorted(rollouts.lengths)[samples // 2],
        "tokens_longest": max(rollouts.lengths),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--judge-s", type=float, default=2.0)
    parser.add_argument("--rollout-s", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.samples, given.judge_s, given.rollout_s, given.concurrency)
    if given.json:
        print(json.dumps(found))
        return
    print(
        f"{found['samples']} samples of {found['tokens_median']} tokens (median) to {found['tokens_longest']}: "
        f"rollout {found['rollout_s']} s, rewards add {found['added_s']} s; after the rollout they would add "
        f"{found['in_turn_s']} s ({found['failed']} failed; load {found['load']})"
    )


if __name__ == "__main__":
    main()
