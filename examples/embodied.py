"""PPO on a simulated pendulum as a flow: a simulator on the CPU, an estimator and a trainer on devices.

    pip install 'rlix[mujoco]'
    RLIX_VIRTUAL_GPUS=2 python examples/embodied.py

Between steps a simulation is bytes in its item: physics, clock and counters. Simulators keep nothing, so whichever goes
on with it, after whatever pause, goes on equal to the bit. What the trainer keeps moves with it.
"""

import time

import gymnasium as gym
import mujoco
import numpy as np
import ray
import torch
from torch import nn

from rlix.flow import Flow, FlowWorker, Part

ENV, ENVS, LENGTH, GOAL, MOST_STEPS = "InvertedPendulum-v5", 8, 256, 500.0, 60_000
GAMMA, LAMBDA, CLIP, EPOCHS, BATCH, RATE = 0.99, 0.95, 0.2, 10, 256, 1e-3
STATE = mujoco.mjtState.mjSTATE_INTEGRATION


class Policy(nn.Module):
    """Mean action and value of an observation, which it normalises by what it has seen."""

    def __init__(self, inputs=4, actions=1, hidden=64):
        super().__init__()
        self.actor, self.critic = _mlp(inputs, actions, hidden), _mlp(inputs, 1, hidden)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))
        for name, value in (("mean", torch.zeros(inputs)), ("var", torch.ones(inputs)), ("seen", torch.tensor(1e-4))):
            self.register_buffer(name, value.double())
        with torch.no_grad():
            self.actor[-1].weight.mul_(0.01)

    def see(self, observations):
        count, mean = len(observations), observations.mean(0)
        total, far = self.seen + count, mean - self.mean
        both = self.var * self.seen + observations.var(0, unbiased=False) * count
        self.var = (both + far.square() * self.seen * count / total) / total
        self.mean, self.seen = self.mean + far * count / total, total

    def normal(self, observations):
        return ((observations - self.mean) / (self.var + 1e-8).sqrt()).float()

    def log_prob(self, inputs, actions):
        return torch.distributions.Normal(self.actor(inputs), self.log_std.exp()).log_prob(actions).sum(-1)


class Simulation:
    """One environment. `state` is all there is to it."""

    def __init__(self):
        self.env = gym.make(ENV)
        self.inner = self.env.unwrapped

    def begin(self, number):
        self.number, self.episode, self.total = number, -1, 0.0
        self._reset()
        return self

    def step(self, action):
        """Reward, whether the episode has ended, whether by time only, the observation then, and the return so far."""
        low, high = self.env.action_space.low, self.env.action_space.high
        last, reward, ended, late, _ = self.env.step(np.clip(action, low, high))
        self.observation, self.total = last, self.total + reward
        total = self.total
        if ended or late:
            self._reset()
        return reward, ended or late, late and not ended, last, total

    def state(self):
        physics = np.empty(mujoco.mj_stateSize(self.inner.model, STATE))
        mujoco.mj_getState(self.inner.model, self.inner.data, physics, STATE)
        counters = (self.number, self.episode, self.total, self.env.get_wrapper_attr("_elapsed_steps"))
        return physics.tobytes(), counters, self.observation.tobytes()

    def resume(self, state):
        physics, (self.number, self.episode, self.total, elapsed), observation = state
        self.env.reset(seed=0)
        mujoco.mj_setState(self.inner.model, self.inner.data, np.frombuffer(physics), STATE)
        mujoco.mj_forward(self.inner.model, self.inner.data)
        self.env.set_wrapper_attr("_elapsed_steps", elapsed)
        self.observation = np.frombuffer(observation).copy()
        return self

    def _reset(self):
        self.episode, self.total = self.episode + 1, 0.0
        self.observation, _ = self.env.reset(seed=1000 * self.number + self.episode)


class Simulate(FlowWorker):
    def __init__(self):
        self.spare = []

    def run(self, items):
        """`LENGTH` steps of every simulation, with the policy and noise of its own."""
        if not items:
            return []
        self.spare += [Simulation() for _ in range(len(items) - len(self.spare))]
        pairs = zip(self.spare, items, strict=False)
        sims = [sim.resume(at) if isinstance(at, tuple) else sim.begin(at) for sim, (at, *_) in pairs]
        policy, step = ray.get(items[0][1]), items[0][2]
        noise = torch.stack([torch.randn(LENGTH, 1, generator=_seeded(step, sim.number)) for sim in sims], 1)
        rows = []
        for t in range(LENGTH):
            seen = torch.as_tensor(np.stack([sim.observation for sim in sims]))
            with torch.no_grad():
                mean = policy.actor(policy.normal(seen))
            actions = (mean + policy.log_std.exp() * noise[t]).detach()
            rows.append((seen, actions, [sim.step(act.numpy()) for sim, act in zip(sims, actions, strict=True)]))
        return [
            {
                "seen": torch.stack([seen[i] for seen, _, _ in rows] + [torch.as_tensor(sim.observation)]),
                "actions": torch.stack([actions[i] for _, actions, _ in rows]),
                "rewards": torch.tensor([float(out[i][0]) for _, _, out in rows]),
                "ended": torch.tensor([out[i][1] for _, _, out in rows]),
                "late": torch.tensor([out[i][2] for _, _, out in rows]),
                "last": torch.as_tensor(np.stack([out[i][3] for _, _, out in rows])),
                "returns": [out[i][4] for _, _, out in rows if out[i][1]],
                "state": sim.state(),
                "policy": items[0][1],
            }
            for i, sim in enumerate(sims)
        ]


class Estimate(FlowWorker):
    @torch.no_grad()
    def judge(self, paths):
        """Advantages and targets, by generalised advantage estimation."""
        for path in paths:
            policy = ray.get(path["policy"])
            values = policy.critic(policy.normal(path["seen"]))[:, 0]
            after = policy.critic(policy.normal(path["last"]))[:, 0]
            rewards = path["rewards"] + GAMMA * after * path["late"]
            advantage, gained = torch.zeros(LENGTH), torch.zeros(())
            for t in reversed(range(LENGTH)):
                goes_on = (~path["ended"][t]).float()
                gained = rewards[t] + GAMMA * values[t + 1] * goes_on - values[t] + GAMMA * LAMBDA * goes_on * gained
                advantage[t] = gained
            inputs = policy.normal(path["seen"][:-1])
            path |= {"advantage": advantage, "target": advantage + values[:-1], "inputs": inputs}
            path["old"] = policy.log_prob(inputs, path["actions"])
        return paths


class Learn(FlowWorker):
    def __init__(self):
        torch.manual_seed(0)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=RATE, eps=1e-5)

    def update(self, paths):
        """PPO on all paths; of each its simulation's state, its episodes' returns, and the new policy."""
        names = ("inputs", "actions", "old", "advantage", "target")
        inputs, actions, old, gain, target = (torch.cat([path[name] for path in paths]) for name in names)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(inputs)).split(BATCH):
                ratio = (self.policy.log_prob(inputs[rows], actions[rows]) - old[rows]).exp()
                loss = -torch.min(ratio * gain[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * gain[rows]).mean()
                loss = loss + 0.5 * (self.policy.critic(inputs[rows])[:, 0] - target[rows]).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                self.optimizer.step()
        self.policy.see(torch.cat([path["seen"][:-1] for path in paths]))
        return [(path["state"], path["returns"], self.policy) for path in paths]

    def save(self):  # for a plan that moves this part
        return self.policy.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()

    def restore(self, state):
        policy, optimizer, random = state
        self.policy.load_state_dict(policy)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(random)


def _mlp(inputs, outputs, hidden):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


def _seeded(step, number):
    return torch.Generator().manual_seed(1_000_003 * step + number)


def fresh(count, step=0):
    torch.manual_seed(0)
    policy = ray.put(Policy())
    return [(number, policy, step) for number in range(count)]


flow = Flow(
    "pendulum",
    [
        Part("simulate", Simulate, "run", cpu_ranks=2),
        Part("estimate", Estimate, "judge", ("simulate",)),
        Part("learn", Learn, "update", ("estimate",), most=1, chunk=ENVS),
    ],
    items=ENVS,
    sample=fresh,
)


def main():
    with flow.start(gpus=2) as running:
        print(running.explain())
        items, returns, began = fresh(ENVS), [], time.monotonic()
        for step in range(1, MOST_STEPS // (ENVS * LENGTH) + 1):
            made = running.step(items)
            returns += [total for _, ended, _ in made for total in ended]
            mean = float(np.mean(returns[-20:])) if returns else 0.0
            print(f"{step * ENVS * LENGTH} steps, {time.monotonic() - began:.0f} s: {mean:.0f}", flush=True)
            if len(returns) >= 20 and mean >= GOAL:
                return
            policy = ray.put(made[0][2])
            items = [(state, policy, step) for state, _, _ in made]


if __name__ == "__main__":
    main()
