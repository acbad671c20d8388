"""Elastic rollouts: tokens/s through `RolloutManager` against the same replica given everything at once, in one run.

    python -m benchmarks.rollout [--executor transformers|vllm] [--trajectories 256] [--shrink-s 3] [--json FILE]

Lengths are lognormal (sigma 1.2), as reasoning answers are: a few are ten times as long as the median. *Direct* hands
all trajectories to the replica's executor in one call: its own batching decides. *Managed* is what a job does: the
manager keeps the replica's slots filled. *Shrunk* is the same while the lease is taken back every `--shrink-s` seconds
and granted again at once: what is in flight is aborted, offloaded, loaded and resumed from its tokens. Rates are per
second in which the replica had the device and something to do, so that loading counts neither for nor against anybody.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

import rlix
from benchmarks.generation import build_model
from rlix.engine.executors.registry import backend
from rlix.engine.inference.requests import GenerationRequest
from rlix.engine.weights.publication import PublishedWeights, named_weights, publish
from rlix.node.run_folder import Span
from rlix.pipeline.rollout.rollout import RolloutManager
from rlix.pipeline.rollout.router import Router, Sampling, Trajectory
from rlix.protocol.messages import Cluster, Demand, DeviceKind, Fence, Lease, LeaseState, LeaseStatus, Process
from rlix.protocol.types import Phase

SIGMA = 1.2
TIMEOUT_S = 1800.0


class Pool:
    """The control plane's part: one bundle, granted and taken back as the benchmark says; and the spans of the run."""

    def __init__(self) -> None:
        self.epoch = 0
        self.lease: Lease | None = None
        self.spans_seen: list[Span] = []

    def grant(self) -> Lease:
        self.epoch += 1
        self.lease = Lease(self.epoch, "bench", "actor_infer", Phase.ROLLOUT, (0,), 0)
        return self.lease

    def report_demand(self, cluster: str, demand: Demand) -> None:
        pass

    def name_holders(self, cluster: str, processes: Mapping[int, Process]) -> None:
        pass

    def release(self, lease: Lease) -> None:
        pass

    def fence(self, lease: Lease) -> Fence:
        return Fence("bench", lease.epoch)

    def leases(self) -> tuple[LeaseStatus, ...]:
        return (LeaseStatus(self.lease, LeaseState.ACTIVE),) if self.lease else ()

    def spans(self, spans: Sequence[Span]) -> None:
        self.spans_seen += spans


def draw_lengths(count: int, median: int, longest: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(math.log(median), SIGMA, count)
    return [int(n) for n in np.clip(drawn, 1, longest).round()]


def direct(engine: rlix.InferenceEngine, pool: Pool, weights: PublishedWeights, work: list[GenerationRequest]) -> float:
    """Tokens per second when the replica is given everything in one call."""
    fence = pool.fence(pool.grant())
    engine.replicas.run("load", weights, fence, timeout_s=TIMEOUT_S)
    start = time.perf_counter()
    ((*results,),) = engine.replicas.run("generate", work, timeout_s=TIMEOUT_S)
    seconds = time.perf_counter() - start
    engine.replicas.run("offload", fence, True, timeout_s=TIMEOUT_S)
    return sum(len(result.token_ids) for result in results) / seconds


def managed(
    engine: rlix.InferenceEngine,
    pool: Pool,
    weights: PublishedWeights,
    work: list[GenerationRequest],
    slots: int,
    shrink_s: float | None,
) -> tuple[float, int, int]:
    """Tokens per busy second through a rollout manager; how often the lease was taken back; tokens of context that were
    lost with it."""
    pool.spans_seen.clear()
    manager = RolloutManager(
        Cluster("actor_infer", 1, (0,)),
        replicas=engine.replicas,
        router=Router(1, slots),
        client=pool,
        folder=pool,  # type: ignore[arg-type]
    )
    try:
        manager.publish(weights)
        lease = pool.grant()
        manager.grow([lease])
        trajectories = [Trajectory(r.id, r.prompt_ids, r.seed, Sampling(r.max_new_tokens)) for r in work]
        asked = manager.submit(0, trajectories)
        shrinks, again, stop = 0, 0, threading.Event()
        while shrink_s is not None and not all(one.done() for one in asked):
            stop.wait(shrink_s)
            if all(one.done() for one in asked):
                break
            (ack,) = manager.request_shrink([lease])
            ack.result(timeout=TIMEOUT_S)
            shrinks += 1
            again += sum(t.tokens_held for t in trajectories if t.token_ids and t.finish_reason is None)
            lease = pool.grant()
            manager.grow([lease])
        finished = manager.wait(asked, TIMEOUT_S, stop)
        (ack,) = manager.request_shrink([lease])
        ack.result(timeout=TIMEOUT_S)
    finally:
        manager.close()
    busy_s = sum(span.end - span.start for span in pool.spans_seen if span.kind == "busy")
    return sum(len(t.token_ids) for t in finished) / busy_s, shrinks, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument(
        "--fast", action="store_true", help="transformers: answers may depend on what they are batched with"
    )
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--median", type=int, default=40, help="tokens")
    parser.add_argument("--longest", type=int, default=900, help="tokens")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--shrink-s", type=float, default=3.0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kind = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU
    os.environ.update(backend(options.executor).environment(kind, 1, True))
    rlix.init(virtual_gpus=None if kind is DeviceKind.CUDA else 1, address="local")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        build_model(path, options.hidden, options.layers)
        engine = rlix.InferenceEngine(str(path), executor=options.executor)
        engine.build(max_num_seqs=options.slots, max_model_len=1024, load=False, exact=False if options.fast else None)
        model = Qwen2ForCausalLM.from_pretrained(path)
        weights = publish(named_weights(model).items(), 1)
        rates: dict[str, list[float]] = {"direct": [], "managed": [], "shrunk": []}
        lengths = draw_lengths(options.trajectories, options.median, options.longest)
        pool, shrinks, again = Pool(), 0, 0
        for number in range(options.rounds + 1):
            work = [
                GenerationRequest(f"{number}/{i}", tuple(range(3, 19)), length, seed=i)
                for i, length in enumerate(lengths)
            ]
            found: dict[str, Any] = {"direct": direct(engine, pool, weights, work)}
            found["managed"], *_ = managed(engine, pool, weights, work, options.slots, None)
            found["shrunk"], count, held = managed(engine, pool, weights, work, options.slots, options.shrink_s)
            if number:  # the first round warms up
                shrinks, again = shrinks + count, again + held
                for name, rate in found.items():
                    rates[name].append(rate)
        engine.close()
    rlix.shutdown()
    result: dict[str, Any] = {
        "executor": options.executor,
        "tokens": sum(lengths),
        "shrinks": shrinks / options.rounds,
        "again": again / options.rounds,
        **{f"{name}_tokens_per_s": statistics.median(rate) for name, rate in rates.items()},
        **{
            f"{name}_over_direct": statistics.median(a / b for a, b in zip(rates[name], rates["direct"], strict=True))
            for name in ("managed", "shrunk")
        },
    }
    print(f"{options.executor}: {len(lengths)} trajectories of {min(lengths)} to {max(lengths)} tokens")
    print(f"  direct   {result['direct_tokens_per_s']:8,.0f} tokens/s")
    for name in ("managed", "shrunk"):
        print(
            f"  {name:8} {result[f'{name}_tokens_per_s']:8,.0f} tokens/s, {result[f'{name}_over_direct']:.2f} of direct"
        )
    lost = f"contexts of {result['again']:,.0f} tokens were computed again beside {result['tokens']:,}"
    print(f"  {result['shrinks']:.1f} shrinks a run: {lost}")
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
