"""TRL users' scripts that end in many ways, each in a process of its own: forked from one that has imported what takes
seconds. Arguments: model, output folder, "plain" or "pool". Writes `ends.json`: by name the wait status of each."""

import gc
import json
import os
import signal
import sys
import warnings
from pathlib import Path

sys.modules["vllm"] = None  # which TRL would import, for seconds and for nothing
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from rlix.pipeline.tokenizer import load_tokenizer  # noqa: E402

model, out, kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
IDS = torch.arange(6).view(1, -1)


def build(start=model, callbacks=(), **more):
    return GRPOTrainer(
        model=start,
        reward_funcs=lambda completions, **_: [text.count("1") / max(1, len(text)) for text in completions],
        args=GRPOConfig(
            output_dir=str(out / "trainer"), per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
            max_steps=1, gradient_checkpointing=False, learning_rate=5e-3, save_strategy="no", logging_steps=1,
            report_to=[], use_cpu=True, bf16=False, seed=7, disable_tqdm=True, per_device_eval_batch_size=4,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{i % 10}{i % 7}>" for i in range(32)]}),
        processing_class=load_tokenizer(Path(model)),
        callbacks=list(callbacks),
        **more,
    )  # fmt: skip


def uses_it_before_between_and_after(folder):
    looks = Looks()
    trainer = build(callbacks=[looks])
    kept = trainer.model.state_dict()  # sees what is learnt
    tokens = trainer.model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)
    metrics = trainer.evaluate(eval_dataset=Dataset.from_dict({"prompt": ["1>"]}))
    trainer.train()
    torch.save((tokens, metrics["eval_loss"], kept, looks.sums), folder / "all.pt")
    trainer.model.save_pretrained(folder / "saved")
    trainer.accelerator.save_state(str(folder / "state"))
    second = build(start=trainer.model)
    second.train()
    second.save_model(str(folder / "second"))
    (folder / "second" / "training_args.bin").unlink()  # has the time in it


def merges(folder):
    trainer = build(peft_config=LoraConfig(r=4))
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained(folder)


class Looks(TrainerCallback):
    def __init__(self):
        self.sums = []

    def look(self, args, state, control, model=None, **_):
        self.sums.append(sum(each.detach().sum().item() for each in model.parameters()))

    on_log = on_train_end = on_step_begin = on_step_end = look


def does_not_train(folder):
    build()


def raises_before(folder):
    build()
    raise ValueError("before")


def raises_after(folder):
    trainer = build()
    trainer.train()
    trainer.model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)  # what it holds, it still has then
    raise ValueError("after")


def exits(folder):
    build()
    sys.exit(3)


class Breaks(TrainerCallback):
    def on_step_end(self, *_, **__):
        raise RuntimeError("in a callback")


def raises_in_a_callback(folder):
    build(callbacks=[Breaks()]).train()


def is_interrupted(folder):
    build()
    os.kill(os.getpid(), signal.SIGINT)


def is_terminated(folder):
    build()
    os.kill(os.getpid(), signal.SIGTERM)


def leaves_at_once(folder):
    build()
    os._exit(4)


END = (uses_it_before_between_and_after, merges, does_not_train, raises_before, raises_after, exits,
       raises_in_a_callback, is_interrupted, is_terminated, leaves_at_once)  # fmt: skip


def main():
    """Two at a time; a child returns to run its script at the end of this file."""
    gc.freeze()  # what is imported is not looked through again by each child
    running, status = {}, {}
    for end in END:
        folder = out / kind / end.__name__
        folder.mkdir(parents=True)
        pid = os.fork()
        if not pid:
            return end, folder
        running[pid] = end.__name__
        while len(running) > 1 or (end is END[-1] and running):
            pid, code = os.wait()
            status[running.pop(pid)] = os.waitstatus_to_exitcode(code)
    (out / kind / "ends.json").write_text(json.dumps(status))
    return None


if this := main():
    end, folder = this
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    said = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(said, 2)
    torch.manual_seed(0)
    if kind == "pool":
        os.environ["RLIX_JOB"] = end.__name__
        import rlix.trl  # noqa: F401
    end(folder)
