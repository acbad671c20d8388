"""Embodied training, a policy and MuJoCo's Humanoid that go back and forth: as a flow, as one loop and in plain Ray.

    pip install 'rlix[mujoco]'
    python -m benchmarks.flow_embodied [--envs 64] [--rounds 64] [--steps 5]

All three compute the same to the bit, step by step in turn, with the same classes: the loop in this process with two
threads of physics; plain Ray with an actor that acts and learns and two that simulate; the flow by its plan, with two
ranks that simulate. CPU seconds are of all processes together.
"""

import argparse
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import psutil
import ray
import torch
from mujoco import rollout
from torch import nn

import rlix
from rlix.flow import Circle, Flow, FlowWorker, Part

ITEMS, SUBSTEPS, SEED = 8, 5, 0
MARK = "RLIX_BENCHMARK"  # in the environment of all processes
STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS
Item = dict[str, Any]
"""Some environments: `state` of each, and the `actions` for them."""


def policy() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(47, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 17))


def model() -> Any:
    return gym.make("Humanoid-v5").unwrapped.model


class Act(FlowWorker):
    def __init__(self) -> None:
        self.policy, self.known = policy(), None

    def run(self, items: list[Item]) -> list[Item]:
        """Each item's actions, by the weights and with the noise that it asks for."""
        for item in items:
            if item["weights"] != self.known:
                self.policy.load_state_dict(ray.get(item["weights"]))
                self.known = item["weights"]
            random = torch.Generator().manual_seed(item["number"] + ITEMS * (item["round"] + 1000 * item["step"]))
            with torch.no_grad():
                mean = self.policy(torch.tensor(item["state"][:, 1:], dtype=torch.float32))
                item["actions"] = (mean + 0.1 * torch.randn(mean.shape, generator=random)).numpy()
        return items


class World(FlowWorker):
    def __init__(self, rounds: int, threads: int = 1) -> None:
        self.rounds, self.model = rounds, model()
        self.datas = [mujoco.MjData(self.model) for _ in range(threads)]
        self.paths: dict[int, list[Any]] = {}

    def run(self, items: list[Item]) -> list[Item]:
        """One step of every environment; the last round's items have the path of all."""
        for item in items:
            before, number = item["state"], item["number"]
            control = np.repeat(item["actions"][:, None].astype(np.float64), SUBSTEPS, 1)
            after = rollout.rollout(self.model, self.datas, before, control, persistent_pool=True)[0][:, -1]
            fallen = ~((after[:, 3] > 1.0) & (after[:, 3] < 2.0))
            reward = after[:, 1] - before[:, 1] + 0.05 * ~fallen
            if item["round"] == 0:
                self.paths[number] = []
            path = self.paths.setdefault(number, [])
            path.append((before[:, 1:].astype(np.float32), item["actions"], reward, fallen))
            item["state"] = np.where(fallen[:, None], start(len(before), self.model), after)
            item["round"] += 1
            if item["round"] == self.rounds:
                path = path * (self.rounds if len(path) == 1 else 1)  # a measurement has the last round only
                item["path"] = [np.stack(each) for each in zip(*path, strict=True)]
                del self.paths[number]
        return items


class Learn(FlowWorker):
    def __init__(self) -> None:
        self.policy = policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-3)

    def save(self) -> Any:
        return self.policy.state_dict(), self.optimizer.state_dict()

    def restore(self, state: Any) -> None:
        self.policy.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    def run(self, items: list[Item]) -> list[Any]:
        """A policy gradient of each item; the states to go on from, the reward of all, and the new weights."""
        for item in items:
            seen, actions, reward, fallen = item["path"]
            gain, total = np.zeros_like(reward), np.zeros(reward.shape[1])
            for t in reversed(range(len(reward))):
                gain[t] = total = reward[t] + 0.97 * total * ~fallen[t]
            weight = torch.as_tensor((gain - gain.mean()) / (gain.std() + 1e-6))[..., None]
            mean = self.policy(torch.tensor(seen))
            loss = (weight * (torch.tensor(actions) - mean).square()).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        weights = {name: value.clone() for name, value in self.policy.state_dict().items()}
        return [[item["state"] for item in items], sum(item["path"][2].sum() for item in items), weights]


def start(count: int, of: Any) -> Any:
    data, found = mujoco.MjData(of), np.empty(mujoco.mj_stateSize(of, STATE))
    mujoco.mj_resetData(of, data)
    mujoco.mj_getState(of, data, found, STATE)
    return np.tile(found, (count, 1))


def embodied(rounds: int, envs: int) -> Flow:
    parts = [
        Part("act", Act),
        Part("world", World, kwargs={"rounds": rounds}, cpu_ranks=2),
        Part("learn", Learn, most=1),
    ]
    weights: list[Any] = []

    def sample(count: int) -> list[Item]:
        weights[:] = weights or [ray.put(policy().state_dict())]
        states = [start(envs // ITEMS, model())] * count
        return [item | {"round": rounds - 1} for item in fresh(states, weights[0], 0)]

    return Flow("embodied", parts, ITEMS, sample, circles=[Circle(("act", "world"), rounds)])


def fresh(states: list[Any], weights: Any, step: int) -> list[Item]:
    return [{"number": i, "round": 0, "step": step, "state": s, "weights": weights} for i, s in enumerate(states)]


Step = Callable[[list[Item]], list[Any]]


def loop(rounds: int) -> Step:
    act, world, learn = Act(), World(rounds, 2), Learn()

    def step(items: list[Item]) -> list[Any]:
        for _ in range(rounds):
            items = world.run(act.run(items))
        return learn.run(items)

    return step


def plain_ray(rounds: int) -> Step:
    class Trainer:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.act, self.learn = Act(), Learn()

        def halves(self, *halves: list[Item]) -> list[list[Item]]:
            return [self.act.run(half) for half in halves]

        def update(self, *halves: list[Item]) -> list[Any]:
            return self.learn.run([item for half in halves for item in half])

    trainer = ray.remote(num_cpus=0)(Trainer).remote()
    worlds = [ray.remote(num_cpus=0)(World).remote(rounds) for _ in range(2)]

    def step(items: list[Item]) -> list[Any]:
        refs = [items[: ITEMS // 2], items[ITEMS // 2 :]]
        for _ in range(rounds):
            acted = trainer.halves.options(num_returns=2).remote(*refs)
            refs = [world.run.remote(half) for world, half in zip(worlds, acted, strict=True)]
        return list(ray.get(trainer.update.remote(*refs)))

    return step


def cpu_s() -> float:
    """Of this process and all that it has started, whoever is their parent by now."""
    found = 0.0
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get(MARK) == str(os.getpid()):
                times = process.cpu_times()
                found += times.user + times.system
        except psutil.Error:  # it has gone, or is somebody else's
            continue
    return found


def measured(step: Step, steps: int, envs: int) -> Iterator[tuple[float, float, str]]:
    """Of each step: seconds, seconds of CPU, and what tells two runs apart."""
    states, weights = [start(envs // ITEMS, model())] * ITEMS, ray.put(policy().state_dict())
    for number in range(steps):
        began, before = time.monotonic(), cpu_s()
        states, total, learnt = step(fresh(states, weights, number))
        weights = ray.put(learnt)
        seconds, cpu = time.monotonic() - began, cpu_s() - before
        data = b"".join(value.numpy().tobytes() for value in learnt.values())
        yield seconds, cpu, f"{total!r} {hashlib.blake2b(data, digest_size=8).hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("envs", 64), ("rounds", 64), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    logging.getLogger("rlix").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    os.environ[MARK] = str(os.getpid())
    rlix.init(virtual_gpus=2)
    with embodied(args.rounds, args.envs).start(gpus=2) as running:
        print(running.explain(), flush=True)
        ways = {"one loop": loop(args.rounds), "plain Ray": plain_ray(args.rounds), "flow": running.step}
        runs = {name: measured(step, args.steps + 1, args.envs) for name, step in ways.items()}
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(args.steps + 1):
            found = {name: next(run) for name, run in runs.items()}
            assert len({said for *_, said in found.values()}) == 1, found
            for name, (seconds, cpu, _) in found.items():
                rows[name] += [(seconds, cpu)] if number else []  # the first one warms up
    print(f"\n{args.envs} environments, {args.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    print("| | s a step | CPU s a step | to the loop: s | CPU s |\n|---|---|---|---|---|")
    middle = {name: tuple(median(column) for column in zip(*row, strict=True)) for name, row in rows.items()}
    for name, (seconds, cpu) in middle.items():
        wall, work = (mine / base for mine, base in zip((seconds, cpu), middle["one loop"], strict=True))
        print(f"| {name} | {seconds:.2f} | {cpu:.2f} | {wall:.2f} | {work:.2f} |")
    print(f"planned {running.plan.seconds:.2f} s")


if __name__ == "__main__":
    main()
