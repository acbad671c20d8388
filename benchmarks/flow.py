"""Flows on devices of declared cost: predicted against measured step times of every mode, and what planning is worth.

    python -m benchmarks.flow [hybrid|scales|switches ...] [--steps N]

A device that declares its cost sleeps until its deadline, with the collective of its ranks inside, so that four of them
keep time on any machine. Parts are profiled on 1, 2 and 4 ranks and on some batch sizes; plans use others too. Profiles
are kept in RLIX_HOME.
"""

import argparse
import time
from statistics import median
from typing import Any

import rlix
from rlix.control.settings import Settings
from rlix.flow.parts.flow_worker import FlowWorker
from rlix.flow.planner import Mode
from rlix.flow.profiler.measure import Grid, profile
from rlix.flow.profiler.profile import Profile, path_of
from rlix.flow.programs.flow import Flow
from rlix.flow.programs.running import Running
from rlix.flow.programs.wiring import Part
from rlix.protocol.messages import Device, DeviceKind

DEVICES, ITEMS = 4, 32
GRID = Grid(widths=(1, 2, 4), batches=(1, 4, 12, 32), repeats=2)
LIMIT = 0.05


class Declared(FlowWorker):
    """Costs `fixed` seconds a call and `each` an item, and `switch` to come or go; its state takes `held` bytes."""

    def __init__(self, fixed: float, each: float, switch: float = 0.0, held: float = 0.0) -> None:
        self.fixed, self.each, self.switch, self.held = fixed, each, switch, held
        if self.ctx.world_size > 1:
            self.ctx.init_process_group()

    def run(self, items: list[Any]) -> list[Any]:
        import torch
        import torch.distributed as dist

        deadline = time.monotonic() + self.fixed + self.each * len(items)
        if self.ctx.world_size > 1:
            dist.all_reduce(torch.ones(1))
        time.sleep(max(0.0, deadline - time.monotonic()))
        return items

    def onload(self) -> None:
        time.sleep(self.switch)

    def offload(self) -> None:
        time.sleep(self.switch)

    def memory(self) -> tuple[float, float]:
        return self.held, self.held


def part(name: str, after: tuple[str, ...], most: int | None = None, **costs: float) -> Part:
    return Part(name, Declared, "run", after, costs, most=most)


def flow(name: str) -> tuple[Flow, float]:
    """A flow, and the bytes of a device."""
    parts = {
        # One slow rank, work for many, and a step that is bad at small batches: a hybrid is right.
        "hybrid": [
            part("generate", (), most=1, fixed=0.04, each=0.08),
            part("score", ("generate",), fixed=0.02, each=0.2),
            part("train", ("score",), fixed=0.6, each=0.1),
        ],
        # Everything scales and fits: in turn on all devices.
        "scales": [
            part("generate", (), fixed=0.12, each=0.1),
            part("score", ("generate",), fixed=0.12, each=0.05),
            part("train", ("score",), fixed=0.12, each=0.1),
        ],
        # Only one state fits on a device, and switching costs: each on devices of its own.
        "switches": [
            part("generate", (), fixed=0.03, each=0.1, switch=0.6, held=60.0),
            part("score", ("generate",), fixed=0.03, each=0.1, switch=0.6, held=60.0),
            part("train", ("score",), fixed=0.03, each=0.2, switch=0.6, held=60.0),
        ],
    }[name]
    return Flow(name, parts, ITEMS, lambda count: list(range(count))), 80.0


def measure(name: str, steps: int) -> None:
    this, room = flow(name)
    devices = [Device(i, _node(), "127.0.0.1", i, DeviceKind.CPU, f"flow-{i}") for i in range(DEVICES)]
    path = path_of(Settings.from_env().home, f"benchmark-{name}")
    if not path.exists():
        profile(this, devices, GRID).write(path)
    known = Profile.read(path)
    print(known.describe(), flush=True)
    best = this.plan(known, DEVICES, device_bytes=room)
    plans = [plan for mode in Mode if (plan := best.of(mode)) is not None]
    times: dict[Mode, float] = {}
    with Running(this, devices, plan=plans[0]) as running:
        for plan in plans:
            if plan is not running.plan:
                running.switch(plan)
            for _ in range(steps + 1):
                assert sorted(running.step(list(range(ITEMS)))) == list(range(ITEMS))
            times[plan.mode] = measured = median(running.step_s[-steps:])
            off, chosen = measured / plan.seconds - 1, "planned" if plan is best.best else ""
            row = [name, str(plan.mode), chosen, plan.shape, f"{plan.seconds:.2f}", f"{measured:.2f}", f"{off:+.1%}"]
            print(f"| {' | '.join(row)} |", flush=True)
    others = [seconds for mode, seconds in times.items() if mode is not best.best.mode]
    print(f"{name}: the best other mode takes {min(others) / times[best.best.mode]:.2f} times as long", flush=True)


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["hybrid", "scales", "switches"])
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    rlix.init(virtual_gpus=DEVICES)
    print("| workload | mode | | plan | predicted s | measured s | off |\n|---|---|---|---|---|---|---|")
    for name in args.workloads:
        measure(name, args.steps)


if __name__ == "__main__":
    main()
