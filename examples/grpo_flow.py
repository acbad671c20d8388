"""GRPO on a language model as a flow: answers, rewards and training are parts, measured, planned and run.

    RLIX_VIRTUAL_GPUS=2 python examples/grpo_flow.py

The tiny built-in model learns to say the digit that it reads. `model={"path": ...}` is any Hugging Face causal LM.
"""

from rlix.flow import Flow, FlowWorker, Part
from rlix.pipeline.parts import Generate, Policy, Train

STEPS, PROMPTS = 20, 16
policy = Policy(rollout={"samples_per_prompt": 8, "max_new_tokens": 4}, optimizer={"learning_rate": 1e-3})


class Judge(FlowWorker):
    def run(self, answered):
        return [one.rewarded(text.count(one.prompt.text[0]) / 4 for text in one.texts) for one in answered]


def prompts(step):
    return [f"{(step * PROMPTS + number) % 10}>" for number in range(PROMPTS)]


flow = Flow(
    "grpo", [Generate(policy), Part("judge", Judge, cpu_ranks=1), Train(policy)], PROMPTS, lambda n: prompts(0)[:n]
)

if __name__ == "__main__":
    with flow.start(gpus=2) as running:
        for step in range(STEPS):
            running.step(prompts(step))
            print(f"step {step}: reward {running.metrics['reward']:.3f}, {running.step_s[-1]:.2f} s", flush=True)
