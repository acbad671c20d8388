"""The closed loop of reinforcement learning: roll out, update, sync; the reward rises. Both engines share two devices,
or the one that there is.

python examples/engines/closed_loop.py
"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlix
from rlix.pipeline.algorithms import group_relative_advantages, token_log_probs

STEPS, PROMPTS, SAMPLES, ANSWER = 40, 10, 16, 4
CONFIG = Qwen2Config(
    vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=15,
)  # fmt: skip


class Policy(rlix.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.0, foreach=False)

    def update(self, ids: torch.Tensor, advantages: torch.Tensor) -> None:
        """One policy-gradient step on answers that follow one prompt token each."""
        ids, advantages = ids.to(self.device), advantages.to(self.device)
        log_probs = token_log_probs(self(ids).logits[:, :-1], ids[:, 1:])
        loss = -self.global_mean(log_probs.mean(1) * advantages)
        loss.backward()
        self.clip_grad_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def reward(prompt: int, answer: tuple[int, ...]) -> float:
    """The task: repeat the prompt."""
    return sum(token == prompt for token in answer) / ANSWER


rlix.init(virtual_gpus=2)  # ignored where real GPUs exist
devices = min(2, len(rlix.pool_devices()))
with torch.device("meta"):
    trainer = rlix.TrainEngine(Policy(CONFIG), executor="fsdp2")
trainer.build(tensor_parallel_size=devices, seed=0)
rollout = rlix.InferenceEngine(CONFIG, executor="transformers")
rollout.build(data_parallel_size=devices, colocate_with=trainer, seed=0)
rollout.cuda(weights=trainer.publish())

prompts = [prompt for prompt in range(PROMPTS) for _ in range(SAMPLES)]
rewards = []
for step in range(STEPS):
    outputs = rollout.generate([[p] for p in prompts], {"max_new_tokens": ANSWER, "ignore_eos": True})
    answers = [output.outputs[0].token_ids for output in outputs]
    scores = torch.tensor([reward(p, answer) for p, answer in zip(prompts, answers, strict=True)])
    rewards.append(scores.mean().item())
    ids = torch.tensor([[p, *answer] for p, answer in zip(prompts, answers, strict=True)])
    trainer.update(rlix.NeedParallel(ids), rlix.NeedParallel(group_relative_advantages(scores, SAMPLES)))
    trainer.p2p_weight_sync(rollout)
    if step % 5 == 4:
        print(f"step {step + 1:3d}  reward {sum(rewards[-5:]) / 5:.2f}")
rlix.shutdown()
assert rewards[-1] > 0.5 > rewards[0], "the reward should have risen"
