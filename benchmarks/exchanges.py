"""How much of a policy's switching only passes bundles round, on workloads that no policy was tuned on.

    python -m benchmarks.exchanges [--seeds N] [--policy rlix ...] [--workload at-once ...]

`exchanged`: the share of the bundles taken from rollouts for rollouts (not for gangs) that one plan passes round in a
circle, so that everybody ends with as many as before. `unpaid`: the share that its holder, which still had work, had
for less than twice the time that a load takes. Steps per hour are of the whole pool, until the first job ends.
"""

import argparse
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from rlix.protocol.events import DrainStarted, Event, LeaseGranted
from rlix.protocol.messages import Lease
from rlix.scheduler.policies.base import Policy
from rlix.scheduler.snapshot import Snapshot
from rlix.scheduler.state import State
from rlix.sim.engine import Simulation
from rlix.sim.jobs import draw_jobs
from rlix.sim.results import POLICIES
from rlix.sim.workload import Workload

_LONG = {"median": 2000.0, "sigma": 1.0, "cap": 20000.0, "cap_share": 0.01}
_SHORT = {"median": 900.0, "sigma": 0.7, "cap": 6000.0}


def _job(
    name: str, count: int, trajectories: int, lengths: dict[str, float], gangs: list[tuple[int, float]], **more: object
) -> dict[str, object]:
    size = more.pop("tensor_parallel", 1)
    phases = ("old_log_probs", "actor_training")[-len(gangs) :]
    return {
        "name": name,
        "count": count,
        "steps": 5,
        "steps_spread": 0.3,
        "rollout": {"trajectories": trajectories, "lengths": lengths, "tensor_parallel": size},
        "gangs": [{"phase": p, "gpus": n, "seconds": s} for p, (n, s) in zip(phases, gangs, strict=True)],
        **more,
    }  # fmt: skip


_AT_ONCE = {"expand_s": 0.0, "shrink_s": 0.0, "sync_s": 0.0, "move_s": 0.0}
_QUICK = {"expand_s": 0.2, "shrink_s": 0.1, "sync_s": 0.0, "move_s": 0.0, "heartbeat_s": 0.5}
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload.model_validate({"name": name, "pool": {"gpus": gpus}, "jobs": jobs, **more})
        for name, gpus, jobs, more in (
            ("lognormal", 16, [_job("j", 8, 384, _LONG, [(4, 10.0), (4, 40.0)])], {}),
            ("at-once", 16, [_job("j", 8, 384, _LONG, [(4, 10.0), (4, 40.0)])], {"switching": _AT_ONCE}),
            (
                "two-kinds",
                24,
                [
                    _job("long", 5, 512, _LONG, [(8, 60.0)], tensor_parallel=2),
                    _job("short", 7, 192, _SHORT, [(4, 15.0)]),
                ],
                {"arrivals": {"kind": "staggered", "spread_s": 900.0}},
            ),
            ("quick", 16, [_job("j", 8, 384, _LONG, [(4, 10.0), (4, 40.0)])], {"switching": _QUICK}),
            ("crowded", 16, [_job("j", 14, 160, _SHORT, [(4, 12.0)], gangs_move=True)], {}),
        )
    )
}  # fmt: skip


@dataclass
class Count:
    for_rollouts: int = 0
    exchanged: int = 0
    unpaid: int = 0


class Counting(Simulation):
    """Counts, plan by plan, what it takes from rollouts for rollouts."""

    def __init__(self, workload: Workload, policy: Policy, seed: int) -> None:
        super().__init__(workload, draw_jobs(workload, seed), policy, seed=seed, check_every=20)
        self.count = Count()
        self._granted_at: dict[int, float] = {}

    def _decide(self, snapshot: Snapshot, state: State, policy: Policy) -> tuple[Event, ...]:
        events = super()._decide(snapshot, state, policy)
        now, paid_s = self.clock.time(), 2 * self.workload.switching.expand_s
        given = [e.lease for e in events if isinstance(e, LeaseGranted) and e.lease.bundle is not None]
        to = {device: lease for lease in given for device in lease.devices}
        taken = [state.leases[e.epoch].lease for e in events if isinstance(e, DrainStarted)]
        taken = [lease for lease in taken if not to.keys().isdisjoint(lease.devices)]
        demands = state.demands
        self.count.for_rollouts += len(taken)
        self.count.exchanged += passed_round(taken, to)
        self.count.unpaid += sum(
            now - self._granted_at[lease.epoch] < paid_s
            for lease in taken
            if demands[lease.pipeline_id, lease.cluster].trajectories
        )
        self._granted_at.update((lease.epoch, now) for lease in given)
        return events


def passed_round(taken: Iterable[Lease], to: dict[int, Lease]) -> int:
    """How many of these leases go round in circles: each to who gives up one as large, back to the first."""
    onwards: dict[str, list[str]] = {}
    for lease in taken:
        taker = to.get(lease.devices[0])
        if taker is not None and taker.devices == lease.devices:
            onwards.setdefault(lease.pipeline_id, []).append(taker.pipeline_id)
    found = 0
    for start in sorted(onwards):
        while (circle := _circle(start, onwards)) is not None:
            for giver, next_ in zip(circle, (*circle[1:], start), strict=True):
                onwards[giver].remove(next_)
            found += len(circle)
    return found


def _circle(start: str, onwards: dict[str, list[str]]) -> list[str] | None:
    paths, seen = [[start]], {start}
    for path in paths:
        for taker in onwards.get(path[-1], ()):
            if taker == start:
                return path
            if taker not in seen:
                seen.add(taker)
                paths.append([*path, taker])
    return None


def measure(workload: Workload, name: str, seeds: Sequence[int]) -> str:
    total, hours, steps, switches = Counter[str](), [], [], 0
    for seed in seeds:
        run = Counting(workload, POLICIES[name], seed)
        trace = run.run()
        first_s, *_ = trace.first or (trace.ended_s,)
        steps.append(trace.first_steps * 3600.0 / first_s)
        hours.append(mean(trace.finished.values()))
        switches += trace.switches
        total.update(vars(run.count))
    taken = max(1, total["for_rollouts"])
    cells = (f"{mean(steps):.1f}", f"{mean(hours):.0f}", str(switches // len(seeds)), str(taken // len(seeds)))
    shares = (f"{total['exchanged'] / taken:.3f}", f"{total['unpaid'] / taken:.3f}")
    return f"| {workload.name} | {name} | " + " | ".join((*cells, *shares)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policy", nargs="+", default=["rlix", "published", "proportional"], choices=list(POLICIES))
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    options = parser.parse_args()
    logging.getLogger("rlix").setLevel(logging.ERROR)
    print("| workload | policy | steps/h | mean job, s | switches | taken for rollouts | exchanged | unpaid |")
    print("|---|---|" + "--:|" * 6)
    for workload in options.workload:
        for policy in options.policy:
            print(measure(WORKLOADS[workload], policy, range(options.seeds)), flush=True)


if __name__ == "__main__":
    main()
