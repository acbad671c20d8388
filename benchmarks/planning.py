"""Planning time of one cycle, from snapshot to plan, at several pool sizes.

    python -m benchmarks.planning [--json] [--repeat N] [--size 1024x128 ...] [--policy proportional]

Scenarios. cold: nothing is held, every job has rollout work, a quarter also wait for a training gang. steady: all is
held as the policy left it, one job in ten reports other demand. change: every job that holds bundles has finished and
the others, which hold nothing, all start: every lease changes hands. Placements. whole: each rollout may use the whole
pool. windows: each a random contiguous window, 2 to 32 times a job's equal share, all different. Bundles have 1, 2, 4
or 8 devices.

plan_ms is elapsed time; cpu, snapshot, check and pass are processor time (equal to it on an idle machine). `pass` is
one Python loop over the snapshot's devices, leases, requests and rollouts; `ratio` is the plan's cpu_ms_p50 over it.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rlix.control.garbage import uncollected
from rlix.protocol.events import (
    DemandReported,
    DevicesDiscovered,
    DrainStarted,
    Event,
    GangRequested,
    LeaseReleased,
    PipelineAdmitted,
    PipelineRegistered,
)
from rlix.protocol.messages import Cluster, Demand, Device, DeviceKind, Registration, ReleaseReason
from rlix.protocol.types import Phase
from rlix.scheduler.commit import decide
from rlix.scheduler.planner import plan
from rlix.scheduler.policies import POLICIES, Policy
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State
from rlix.scheduler.validate import check

SIZES = ("16x4", "256x32", "1024x128", "16384x1000")
NOW = 0.0  # nobody has waited
HELD_S = 15.0  # in a steady pool everybody has had his bundles for so long, which has paid for their loads
Row = dict[str, str | int | float]


def pool_of(gpus: int, jobs: int, placement: str, rng: random.Random) -> State:
    """A pool with `jobs` admitted pipelines and no demand yet."""
    state = State()
    nodes = [f"node{i // 8}" for i in range(gpus)]
    state.apply(
        DevicesDiscovered(tuple(Device(i, nodes[i], "10.0.0.1", i % 8, DeviceKind.CUDA) for i in range(gpus))), NOW
    )
    share = gpus // jobs
    for job in range(jobs):
        size = rng.choice((1, 2, 4, 8) if gpus > 16 else (1, 2, 4))
        width = gpus if placement == "whole" else min(gpus, max(8, share * rng.choice((2, 4, 8, 16, 32))))
        start = rng.randrange(0, gpus - width + 1, 8 if gpus > 16 else 4)
        gang = rng.randrange(0, gpus - max(4, share) + 1, 4)
        clusters = (
            Cluster("actor_infer", size, tuple(range(start, start + width)), elastic=True),
            Cluster("actor_train", 1, tuple(range(gang, gang + max(4, share)))),
        )
        state.apply(PipelineRegistered(Registration(name_of(job), "ns", clusters)), NOW)
        state.apply(PipelineAdmitted(name_of(job)), NOW)
    return state


def name_of(job: int) -> str:
    return f"ft_{job:05d}"


def report(state: State, job: int, trajectories: int) -> None:
    state.apply(DemandReported(name_of(job), "actor_infer", Demand(trajectories)), NOW)


def carry_out(state: State, events: tuple[Event, ...]) -> None:
    """Apply a plan's events and let every shrunk lease acknowledge at once."""
    for event in events:
        state.apply(event, NOW)
    for event in events:
        if isinstance(event, DrainStarted):
            state.apply(LeaseReleased(event.epoch, ReleaseReason.SHRUNK), NOW)


def settle(state: State, policy: Policy) -> None:
    for _ in range(20):
        events = decide(state.snapshot(NOW), state, policy, check_plan=False)
        if not events:
            return
        carry_out(state, events)


def cold(gpus: int, jobs: int, placement: str, rng: random.Random, policy: Policy) -> State:
    state = pool_of(gpus, jobs, placement, rng)
    for job in range(jobs):
        report(state, job, rng.randint(1, 512))
        if job % 4 == 0:
            state.apply(GangRequested(state.next_request_id, name_of(job), "actor_train", Phase.ACTOR_TRAINING), NOW)
    return state


def steady(gpus: int, jobs: int, placement: str, rng: random.Random, policy: Policy) -> State:
    state = cold(gpus, jobs, placement, rng, policy)
    settle(state, policy)
    for job in range(0, jobs, 10):
        report(state, job, rng.randint(1, 512))
    return state


def change(gpus: int, jobs: int, placement: str, rng: random.Random, policy: Policy) -> State:
    state = pool_of(gpus, jobs, placement, rng)
    for job in range(0, jobs, 2):
        report(state, job, rng.randint(256, 512))
    settle(state, policy)
    for job in range(jobs):
        report(state, job, rng.randint(256, 512) if job % 2 else 0)
    return state


SCENARIOS: dict[str, Callable[[int, int, str, random.Random, Policy], State]] = {
    "cold": cold,
    "steady": steady,
    "change": change,
}


def trivial_pass(snapshot: Snapshot) -> int:
    total = 0
    for device in snapshot.devices:
        total += device.id
    for status in snapshot.leases:
        for held in status.lease.devices:
            total += held
    for request in snapshot.requests:
        for wanted in request.devices:
            total += wanted
    for rollout in snapshot.rollouts:
        total += rollout.demand.trajectories
    return total


def times_ms(call: Callable[[], object], repeat: int, clock: Callable[[], float] = time.process_time) -> list[float]:
    times = []
    for _ in range(repeat):
        start = clock()
        call()
        times.append((clock() - start) * 1e3)
    return times


def p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, round(0.99 * (len(times) - 1)))]


def measure(size: str, placement: str, scenario: str, repeat: int, policy: Policy) -> Row:
    gpus, jobs = (int(part) for part in size.split("x"))
    state = SCENARIOS[scenario](gpus, jobs, placement, random.Random(7), policy)
    snapshot = state.snapshot(NOW + (HELD_S if scenario == "steady" else 0.0))
    changes = plan(snapshot, policy)
    check(snapshot, changes)
    repeat = repeat if gpus <= 1024 else max(3, repeat // 2)
    with uncollected():  # as the control plane plans
        planning = times_ms(lambda: plan(snapshot, policy), repeat, time.perf_counter)
        cpu = statistics.median(times_ms(lambda: plan(snapshot, policy), max(3, repeat // 5)))
    floor = statistics.median(times_ms(lambda: trivial_pass(snapshot), repeat))
    return {
        "size": size,
        "placement": placement,
        "scenario": scenario,
        "changes": len(changes.shrinks) + len(changes.grants) + len(changes.expands),
        "plan_ms_p50": round(statistics.median(planning), 3),
        "plan_ms_p99": round(p99(planning), 3),
        "cpu_ms_p50": round(cpu, 3),
        "snapshot_ms": round(statistics.median(times_ms(lambda: state.snapshot(NOW), repeat)), 3),
        "check_ms": round(statistics.median(times_ms(lambda: check(snapshot, changes), repeat)), 3),
        "pass_ms": round(floor, 3),
        "ratio": round(cpu / floor, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeat", type=int, default=100, help="runs per row (half of it for the largest pool)")
    parser.add_argument("--size", nargs="+", default=SIZES, help="GPUsxJOBS, for example 1024x128")
    parser.add_argument("--policy", choices=POLICIES, default="rlix")
    options = parser.parse_args()
    rows = []
    for size in options.size:
        for placement in ("whole", "windows"):
            for scenario in SCENARIOS:
                row = measure(size, placement, scenario, options.repeat, POLICIES[options.policy])
                rows.append(row)
                if not options.json:
                    if len(rows) == 1:
                        print("".join(f"{name:>12}" for name in row))
                    print("".join(f"{value:>12}" for value in row.values()), flush=True)
    if options.json:
        print(json.dumps({"machine": platform.platform(), "python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
