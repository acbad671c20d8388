"""Teach a model to sort digits, from a laptop: pip install tinker, and nothing of RLix.

export TINKER_BASE_URL=http://127.0.0.1:8642 TINKER_API_KEY=tml-...   # as `rlix serve --tinker` prints them
python supervised.py [steps]
"""

import random
import sys

import tinker
from tinker import types

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30
BATCH = 32
draw = random.Random(0)


def datum(tokenizer) -> types.Datum:
    digits = draw.sample("0123456789", 4)
    prompt = tokenizer.encode("".join(digits) + ">")
    answer = [*tokenizer.encode("".join(sorted(digits)), add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        },
    )


def main() -> None:
    service = tinker.ServiceClient()
    name = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(name, rank=16, seed=0).result()
    tokenizer = training.get_tokenizer()
    for step in range(STEPS):
        data = [datum(tokenizer) for _ in range(BATCH)]
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=5e-3))  # sent before the pass has come back
        loss = passed.result().metrics["loss:sum"] / (5 * BATCH)
        stepped.result()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss:.3f} per token")
    print("saved:", training.save_state("sorts").result().path)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokenizer.encode("7302>"))
    answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=5, temperature=0)).result()
    print("7302 >", tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
