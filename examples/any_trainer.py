"""Any training loop as a job of the pool: its bytes leave the devices between its phases.

    RLIX_VIRTUAL_GPUS=2 python examples/any_trainer.py left & python examples/any_trainer.py right

What the loop is does not matter; here it is a plain PyTorch one. Generation on elastic replicas is
`rlix.integrations.rollouts.Rollouts`, which docs/integrations.md shows.
"""

import os
import sys

import torch

import rlix
from rlix.engine.guarded import GuardedSet, named_tensors

job = rlix.attach(sys.argv[1] if len(sys.argv) > 1 else "any trainer", gangs={"actor_train": 1}, stay=True)
(device_id,) = job.registration.cluster("actor_train").devices
device = job.client.devices()[device_id]
if device.kind == "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = device.key  # before CUDA starts
where = torch.device("cuda" if device.kind == "cuda" else "cpu")

with job:
    with job.phase(rlix.Phase.INITIALIZATION):  # nothing may be on a device before there is a lease for it
        model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        resident = GuardedSet(job.name, lambda: named_tensors(model, optimizer), where)
        resident.to_host()
    for step in range(5):
        inputs = torch.randn(256, 4)  # data, rewards, tools: whatever needs no device holds none
        with job.phase(rlix.Phase.ACTOR_TRAINING):  # waits for its turn
            resident.to_device()
            loss = (model(inputs.to(where)) - inputs.to(where).sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            resident.to_host()  # before the block ends nothing may be left there
        print(
            f"{job.name}: step {step}, loss {loss.item():.3f}, {resident.device_bytes} bytes on the device", flush=True
        )
    with resident.readable():  # to save, no device is needed
        torch.save(model.state_dict(), os.devnull)
