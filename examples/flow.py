"""A flow: three parts, written once. Measured here the first time, planned, and run as the plan says.

    RLIX_VIRTUAL_GPUS=4 python examples/flow.py [auto|collocated|disaggregated|hybrid]

A policy guesses which of ten digits is worth most: `Guess` draws, `Judge` pays, `Learn` follows the gradient.
"""

import sys

import ray
import torch
import torch.distributed as dist

from rlix.flow import Flow, FlowWorker

STEPS, ITEMS = 8, 64


class Guess(FlowWorker):
    def run(self, items):
        """Each item's digit, by its own random numbers, whichever rank draws it."""
        chances = ray.get(items[0][1]).softmax(0) if items else None
        return [torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(n)).item() for n, _ in items]


class Judge(FlowWorker):
    def run(self, guesses):
        return [(guess, guess / 9) for guess in guesses]


class Learn(FlowWorker):
    def __init__(self):
        self.weights = torch.zeros(10, requires_grad=True)
        if self.ctx.world_size > 1:
            self.ctx.init_process_group()

    def run(self, paid):
        """A step with everybody's gradient; of each item its reward, and the new weights."""
        guesses, rewards = torch.tensor([g for g, _ in paid]).long(), torch.tensor([r for _, r in paid])
        gain = (self.weights.log_softmax(0)[guesses] * (rewards - 0.5)).sum() / ITEMS
        (gradient,) = torch.autograd.grad(gain, self.weights)
        if self.ctx.world_size > 1:
            dist.all_reduce(gradient)
        with torch.no_grad():
            self.weights += 20 * gradient
        return [(reward, self.weights.detach()) for _, reward in paid]

    def save(self):  # for a plan that moves this part
        return self.weights.detach()

    def restore(self, state):
        self.weights = state.clone().requires_grad_()


def prompts(count, step=0, weights=None):
    shared = ray.put(torch.zeros(10) if weights is None else weights)
    return [(step * ITEMS + i, shared) for i in range(count)]


flow = Flow("guess", [Guess, Judge, Learn], items=ITEMS, sample=prompts)

if __name__ == "__main__":
    mode = sys.argv[1] if sys.argv[1:] else "auto"
    with flow.start(gpus=4, plan=mode) as running:
        print(running.explain())
        made = []
        for step in range(STEPS):
            made = running.step(prompts(ITEMS, step, made[0][1] if made else None))
            print(f"step {step}: reward {sum(reward for reward, _ in made) / ITEMS:.3f}, {running.step_s[-1]:.3f} s")
