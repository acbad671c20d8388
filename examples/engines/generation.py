"""Generation: batches, one stream token by token, and an agent whose tool answers between the model's turns.

python examples/engines/generation.py [MODEL]    # a Hugging Face causal LM with its tokenizer; default: a tiny one
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import rlix
from rlix.engine.inference.turns import Turn
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.spec.model import TinyModel

rlix.init(virtual_gpus=2)  # ignored where real GPUs exist
model = sys.argv[1] if len(sys.argv) > 1 else write_tiny_model(TinyModel(), Path(tempfile.mkdtemp()), seed=0)
engine = rlix.InferenceEngine(model, executor="transformers")  # or "vllm"
engine.build(data_parallel_size=min(2, len(rlix.pool_devices())), max_model_len=64)

# A batch: one dictionary of parameters for all, or one each. Answers come in the order of the prompts.
params = {"max_new_tokens": 6, "temperature": 0.8, "top_p": 0.95, "seed": 1, "ignore_eos": True}
for output in engine.generate(["12>", "34>"], [params, {**params, "seed": 2}]):
    answer = output.outputs[0]
    print(output.request_id, repr(answer.text), [round(logprob, 2) for logprob in answer.logprobs])


# A stream: what `async for` has not taken yet waits; leaving the loop aborts the request.
async def show() -> None:
    async for chunk in engine.stream("567>", params):
        print(repr(chunk.text), chunk.finish_reason or "...")


asyncio.run(show())


# An agent: after each turn a tool answers, and the model goes on; None ends the answer.
async def calculator(turn: Turn) -> str | None:
    await asyncio.sleep(0.01)  # a tool that takes its time holds up its own answer only
    digits = [int(letter) for letter in turn.text if letter.isdigit()]
    return f"={sum(digits)}>" if turn.number < 3 else None


for output in engine.generate(["12>", "34>"], params, on_turn=calculator):
    answer = output.outputs[0]
    by_model = sum(answer.generated)
    print(f"{answer.turns} turns: {answer.text!r}; {by_model} of {len(answer.token_ids)} tokens count in a loss")

engine.cpu()  # the devices are free; the weights wait in host memory
rlix.shutdown()
