"""A TRL script. Arguments: a model's folder, where to write the log, and steps. A row: loss, gradient norm, reward."""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, out, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
outside: list[int | None] = []  # bytes on the device while no lease is held, by step; None: the script is no job


class BetweenSteps(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        attached = getattr(trainer, "_rlix", None)  # which the plain script has not
        outside.append(sum(each.device_bytes for each in attached.parts.all) if attached else None)


def share_of_ones(completions: list[str], **_: object) -> list[float]:
    return [text.count("1") / max(1, len(text)) for text in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=share_of_ones,
    args=GRPOConfig(
        output_dir=str(out.parent / "trl"), per_device_train_batch_size=32, num_generations=8, max_completion_length=8,
        max_steps=steps, learning_rate=3e-3, gradient_checkpointing=False, bf16=False, use_cpu=True, seed=7,
        save_strategy="no", logging_steps=1, report_to=[], disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"prompt": [f"{i % 10}{i % 7}>" for i in range(64)]}),
    processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    callbacks=[BetweenSteps()],
)  # fmt: skip
trainer.train()
rows = [[row["loss"], row["grad_norm"], row["reward"]] for row in trainer.state.log_history if "loss" in row]
seen = [held for held in outside if held is not None]
out.write_text(json.dumps({"rows": rows, "outside": max(seen) if len(seen) == len(outside) else None}))
