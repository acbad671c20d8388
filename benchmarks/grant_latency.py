"""How long a job waits for devices: from the request until it has the lease.

    python -m benchmarks.grant_latency [--count 300] [--gpus 8] [--json FILE]

Two cases, each in milliseconds and as a multiple of an empty round trip to a Ray actor, in turns with it:
`idle` (the devices are free) and `preempt` (every device runs another job's rollout, which gives it back at once, so
that what is measured is the control plane's own part), both by a bare call and through `JobClient`, as jobs ask.
"""

import argparse
import json
import platform
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

from rlix import JobClient, Phase, init, shutdown
from rlix.control.gang_queue import Asked
from rlix.control.rollout_lease import Taken
from rlix.control.settings import Settings
from rlix.protocol.messages import Lease
from rlix.protocol.types import NAMESPACE, SCHEDULER_ACTOR_NAME, pipeline_namespace

WARM_UP = 20
TIMEOUT_S = 60.0
POLL_S = 5.0


class Echo:
    async def ping(self) -> None:
        return None


class GivesBackAtOnce:
    """A rollout without workers, in a process of its own as rollouts are: it gives a bundle back when it is told."""

    def __init__(self, pipeline_id: str) -> None:
        client = JobClient(pipeline_id)
        self._rollout = client.rollout("actor_infer", 1_000_000)
        self._giving = ThreadPoolExecutor(1)  # as pipelines do: all that is free by now in one call
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, name="bundles", daemon=True).start()

    def holds(self, bundles: int) -> None:
        """Returns once the rollout runs on so many bundles."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._rollout.leases) == bundles, TIMEOUT_S):
                raise TimeoutError(f"{len(self._rollout.leases)} bundles after {TIMEOUT_S:g} s, not {bundles}")

    def _follow(self) -> None:
        while True:
            taken = [change.lease for change in self._rollout.poll(POLL_S) if isinstance(change, Taken)]
            if taken:
                self._giving.submit(self._rollout.give_back, *taken)
            with self._changed:
                self._changed.notify_all()


def new_job(orchestrator: Any, cluster: str, gpus: int) -> str:
    job_id = str(get(orchestrator.allocate_pipeline_id.remote("ft")))
    get(
        orchestrator.register_pipeline.remote(
            pipeline_id=job_id,
            ray_namespace=pipeline_namespace(job_id),
            cluster_tp_configs={cluster: 1},
            cluster_device_mappings={cluster: list(range(gpus))},
        )
    )
    get(orchestrator.admit_pipeline.remote(pipeline_id=job_id))
    return job_id


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=TIMEOUT_S)


def measure(
    count: int, empty: Callable[[], Any], timed: Callable[[], Any], after: Callable[[Any], None]
) -> dict[str, float]:
    """p50 and p99 of `timed` in milliseconds, and p50 in those of `empty`, each of which is timed just before;
    `after` gets the result and is not timed."""
    empties, times = [], []
    for number in range(WARM_UP + count):
        start = time.perf_counter()
        empty()
        between = time.perf_counter()
        result = timed()
        end = time.perf_counter()
        after(result)
        if number >= WARM_UP:
            empties.append((between - start) * 1e3)
            times.append((end - between) * 1e3)
    empties.sort()
    times.sort()
    p50 = times[count // 2]
    return {"p50_ms": p50, "p99_ms": times[int(count * 0.99)], "p50_round_trips": p50 / empties[count // 2]}


def run(orchestrator: Any, count: int, gpus: int) -> dict[str, dict[str, float]]:
    scheduler = ray.get_actor(SCHEDULER_ACTOR_NAME, NAMESPACE)
    echo = ray.remote(num_cpus=0)(Echo).remote()

    def ping() -> None:
        get(echo.ping.remote())

    trainer = new_job(orchestrator, "actor_train", gpus)
    client = JobClient(trainer)

    def direct() -> Lease:
        asked = Asked(key=uuid.uuid4().hex, timeout_s=TIMEOUT_S)
        lease: Lease | None = get(
            scheduler.poll_gang.remote(trainer, "actor_train", Phase.ACTOR_TRAINING, asked, TIMEOUT_S)
        )
        assert lease is not None
        return lease

    def through_client() -> Lease:
        return client.acquire("actor_train", Phase.ACTOR_TRAINING, TIMEOUT_S)

    results = {
        "round trip": measure(count, ping, ping, lambda _: None),
        "idle": measure(count, ping, direct, client.release),
        "idle, JobClient": measure(count, ping, through_client, client.release),
    }
    rollout = new_job(orchestrator, "actor_infer", gpus)
    follower = ray.remote(num_cpus=0)(GivesBackAtOnce).options(max_concurrency=4).remote(rollout)
    get(follower.holds.remote(gpus))

    def give_back(lease: Lease) -> None:
        client.release(lease)
        get(follower.holds.remote(gpus))

    results["preempt"] = measure(count, ping, direct, give_back)
    results["preempt, JobClient"] = measure(count, ping, through_client, give_back)
    ray.kill(follower)  # before the control plane, which it would ask in vain
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="requests per case")
    parser.add_argument("--gpus", type=int, default=8, help="virtual GPUs")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, - for standard output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        start = time.perf_counter()
        settings = Settings(home=Path(home), ray_address="local")
        orchestrator = init(virtual_gpus=options.gpus, settings=settings, log_level="WARNING")
        start_s = time.perf_counter() - start
        try:
            results = run(orchestrator, options.count, options.gpus)
        finally:
            shutdown()
    report = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, Ray {ray.__version__}",
        "count": options.count,
        "gpus": options.gpus,
        "init_s": start_s,
        "cases": results,
    }
    text = json.dumps(report, indent=2)
    if options.json is not None and str(options.json) != "-":
        options.json.write_text(text + "\n")
    if options.json is not None and str(options.json) == "-":
        sys.stdout.write(text + "\n")
        return
    print(
        f"{report['machine']}; {options.count} requests per case on {options.gpus} virtual GPUs; init {start_s:.1f} s"
    )
    print(f"{'':20}{'p50 ms':>9}{'p99 ms':>9}{'p50 in round trips':>20}")
    for name, row in results.items():
        print(f"{name:20}{row['p50_ms']:9.2f}{row['p99_ms']:9.2f}{row['p50_round_trips']:20.1f}")


if __name__ == "__main__":
    main()
