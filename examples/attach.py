"""A plain script as a job of the pool: no pipeline, no job file. Start several, and they take turns on its GPUs.

    RLIX_VIRTUAL_GPUS=4 python examples/attach.py left & python examples/attach.py right

The first one starts the pool that both share, of four virtual GPUs where there are no real ones.
"""

import sys

import torch

import rlix
from rlix.control.rollout_lease import Taken

STEPS, BATCHES = 5, 40
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = rlix.attach(sys.argv[1] if len(sys.argv) > 1 else "toy", gpus=4)
devices = job.client.devices()


def place(device: int) -> str:
    return f"cuda:{devices[device].index}" if devices[device].kind == "cuda" else "cpu"


def sample() -> torch.Tensor:
    """Batches from whatever devices the job has at the moment; they come and go meanwhile."""
    batches: list[torch.Tensor] = []
    with job.rollout(demand=BATCHES) as rollout:  # at its end every device is given back
        while len(batches) < BATCHES:
            for change in rollout.poll(wait_s=0.0 if rollout.leases else 5.0):
                if isinstance(change, Taken):  # others need it: free its memory, and say so in change.deadline_s
                    torch.cuda.empty_cache()
                    rollout.give_back(change.lease)
            batches += [torch.randn(16, 4, device=place(lease.devices[0])).cpu() for lease in rollout.leases]
            rollout.report(max(0, BATCHES - len(batches)))
        torch.cuda.empty_cache()
    return torch.cat(batches[:BATCHES])


def train(inputs: torch.Tensor, where: str) -> float:
    model.to(where)  # a larger one would be spread over all of the lease's devices
    inputs = inputs.to(where)
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.to("cpu")
    return loss.item()


with job:
    for step in range(STEPS):
        inputs = sample()
        with job.phase(rlix.Phase.ACTOR_TRAINING) as lease:  # waits for its turn; until the end nobody else is there
            loss = train(inputs, place(lease.devices[0]))
            torch.cuda.empty_cache()
        print(f"{job.name}: step {step} on devices {list(lease.devices)}, loss {loss:.3f}", flush=True)
