"""GRPO in plain TRL, nothing of RLix in it: which of two numbers is larger?

    rlix run --trl examples/trl_grpo.py -- larger-model     # as a job of the pool; `python` instead: without RLix

The model is that of the tutorial, exported; any folder or hub name of a causal LM with a fast tokenizer will do.
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

MODEL, STEPS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]


def digits(completions, answer, **_):
    """The share of the answer's digits that stand where they should."""
    return [
        sum(a == b for a, b in zip(given.strip(), wanted, strict=False)) / max(len(given.strip()), len(wanted))
        for given, wanted in zip(completions, answer, strict=True)
    ]


trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
    reward_funcs=digits,
    args=GRPOConfig(
        output_dir="trl-larger",
        max_steps=STEPS,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=3,
        learning_rate=1e-4,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=True,  # without these two on GPUs
        bf16=False,
    ),
    train_dataset=Dataset.from_dict(
        {"prompt": [f"{a},{b}=" for a, b in pairs], "answer": [str(max(pair)) for pair in pairs]}
    ),
    processing_class=PreTrainedTokenizerFast.from_pretrained(MODEL),
)
trainer.train()
print([round(row["reward"], 3) for row in trainer.state.log_history if "reward" in row])
