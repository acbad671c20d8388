"""Reinforcement learning from a laptop: a model learns to answer with sevens. pip install tinker, and nothing of RLix.

export TINKER_BASE_URL=http://127.0.0.1:8642 TINKER_API_KEY=tml-...   # as `rlix serve --tinker` prints them
python reinforce.py [steps]
"""

import sys

import tinker
from tinker import types

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
PROMPTS = ["1>", "23>", "456>", "7890>"]
SAMPLES, LENGTH = 16, 6


def datum(prompt: list[int], answer, advantage: float) -> types.Datum:
    tokens, before = prompt + list(answer.tokens), len(prompt) - 1

    def row(values: list[float]) -> types.TensorData:
        return types.TensorData(data=[0.0] * before + values, dtype="float32", shape=[len(tokens) - 1])

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            "logprobs": row(list(answer.logprobs)),
            "advantages": row([advantage] * len(answer.tokens)),
        },
    )


def main() -> None:
    service = tinker.ServiceClient()
    name = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(name, rank=16, seed=0).result()
    tokenizer = training.get_tokenizer()
    (seven,) = tokenizer.encode("7", add_special_tokens=False)
    params = types.SamplingParams(max_tokens=LENGTH, stop=[])
    for step in range(STEPS):
        sampler = training.save_weights_and_get_sampling_client().result()
        prompts = [tokenizer.encode(text) for text in PROMPTS]
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
        data, rewards = [], []
        for prompt, future in zip(prompts, asked, strict=True):
            answers = future.result().sequences
            group = [list(answer.tokens).count(seven) / LENGTH for answer in answers]
            mean = sum(group) / len(group)  # the others with the same prompt are what an answer is compared with
            data += [datum(prompt, answer, reward - mean) for answer, reward in zip(answers, group, strict=True)]
            rewards += group
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=2e-2))
        passed.result(), stepped.result()
        print(f"step {step}: reward {sum(rewards) / len(rewards):.3f}")


if __name__ == "__main__":
    main()
