"""Training on two devices equals plain PyTorch in one process: the same losses and weights after 20 steps.

python examples/engines/training.py
"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlix
from rlix.engine.weights import publication

STEPS, BATCH, LENGTH = 20, 8, 16
CONFIG = Qwen2Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


class Policy(rlix.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Written as for one process; every rank runs it on its share of the batch."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_step(self, ids: list[list[int]]) -> float:
        batch = torch.tensor(ids, device=self.device)
        loss = self(batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.dp_mean(loss).item()


def batches() -> list[list[list[int]]]:
    source = torch.Generator().manual_seed(1)
    first = torch.randint(0, 64, (STEPS, BATCH, 1), generator=source)
    counting: list[list[list[int]]] = ((first + torch.arange(LENGTH)) % 64).tolist()
    return counting


torch.manual_seed(0)
place = "cuda" if torch.cuda.is_available() else "cpu"
plain = Policy(CONFIG).to(place)  # without an engine it is a plain module
plain.on_weights_materialized()
expected = [plain.train_step(ids) for ids in batches()]

rlix.init(virtual_gpus=2)  # ignored where real GPUs exist
with torch.device("meta"):
    trainer = rlix.TrainEngine(Policy(CONFIG), executor="fsdp2")
devices = min(2, len(rlix.pool_devices()))
trainer.build(tensor_parallel_size=devices, seed=0)  # of two devices each holds half of every parameter
losses = [trainer.train_step(rlix.NeedParallel(ids))[0] for ids in batches()]

trained = {entry.name: tensor for entry, tensor in publication.stream(trainer.publish())}
loss_error = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
weight_error = max(float((trained[name] - value.cpu()).abs().max()) for name, value in plain.state_dict().items())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {STEPS} steps on {len(trainer.devices)} devices")
print(f"largest difference from plain PyTorch: losses {loss_error:.1e}, weights {weight_error:.1e}")
rlix.shutdown()
assert max(loss_error, weight_error) < (1e-6 if place == "cpu" else 1e-4)
