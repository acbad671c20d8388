"""A TRL user's script, run twice in the same ranks: plain, then as a job of the pool. Arguments: model and output."""
# ruff: noqa: E402, F401

import json
import os
import sys
from pathlib import Path

sys.modules["vllm"] = None  # which TRL would import, for seconds and for nothing

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rlix.pipeline.tokenizer import load_tokenizer

model, out = sys.argv[1], Path(sys.argv[2])


def share_of_ones(completions, **_):
    return [text.count("1") / max(1, len(text)) for text in completions]


def train(name):
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=share_of_ones,
        args=GRPOConfig(
            output_dir=str(out / name), per_device_train_batch_size=2, num_generations=4, max_completion_length=6,
            max_steps=2, gradient_accumulation_steps=2, gradient_checkpointing=False, learning_rate=5e-3,
            save_strategy="no", logging_steps=1, report_to=[], use_cpu=True, bf16=False, seed=7, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i % 10}{i % 7}>" for i in range(32)]}),
        processing_class=load_tokenizer(Path(model)),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    if trainer.accelerator.is_main_process:  # alone
        trainer.model.save_pretrained(out / name / "first")
    else:
        (out / name).mkdir(exist_ok=True)
        torch.save(trainer.model.state_dict(), out / name / "other.pt")
    return [(row["loss"], row["reward"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


plain = train("plain")
import rlix.trl

attached = train("attached")
if os.environ["RANK"] == "0":
    ranks = torch.distributed.get_world_size()
    (out / "result.json").write_text(json.dumps({"plain": plain, "attached": attached, "ranks": ranks}))
