"""Outsiders' programs against a server of this tree: `python tinker_recipes.py CLIENT_PYTHON [NAME...]`.

`make tinker-recipes` runs all of them: tinker-cookbook's loops and recipes, unchanged, two steps each, in an
environment that has tinker-cookbook and not RLix. What they would fetch from a hub lies in their folder, by its name.
"""

import json
import os
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.spec.model import TinyModel

NAME = "Qwen/Qwen3-8B-Base"  # one that tinker-cookbook knows how to write a prompt for, as plain text
FULL = f"{NAME}:full"
RECIPES = "tinker_cookbook.recipes"
_COMMON = "batch_size=4 max_steps=2"
PROGRAMS = {
    "sl_loop": f"{RECIPES}.sl_loop model_name={NAME} {_COMMON} max_length=1024 save_every=1",
    "sl_loop, all weights": f"{RECIPES}.sl_loop model_name={FULL} {_COMMON} max_length=1024 save_every=1",
    "rl_loop": f"{RECIPES}.rl_loop model_name={NAME} batch_size=2 group_size=4 max_steps=2 max_tokens=6 save_every=1",
    "chat_sl": f"{RECIPES}.chat_sl.train model_name={NAME} dataset=chats.jsonl {_COMMON} eval_every=1",
    "math_rl": (
        f"{RECIPES}.math_rl.train model_name={NAME} group_size=4 groups_per_batch=2 max_steps=2 "
        "compute_post_kl=True eval_every=1"
    ),
    "math_rl, off policy": (
        f"{RECIPES}.math_rl.train model_name={NAME} group_size=4 groups_per_batch=2 max_steps=2 "
        "max_steps_off_policy=1 loss_fn=ppo eval_every=0"
    ),
    "dpo": f"{RECIPES}.preference.dpo.train model_name={NAME} renderer_name=role_colon {_COMMON}",
    "prompt_distillation": (
        f"{RECIPES}.prompt_distillation.train model_name={NAME} renderer_name=role_colon "
        f"file_path=chats.jsonl {_COMMON}"
    ),
    "on_policy_distillation": (
        f"{RECIPES}.distillation.on_policy_distillation model_name={NAME} teacher_model={NAME} max_tokens=6 "
        "lora_rank=16 group_size=2 groups_per_batch=2 max_steps=2 eval_every=0"
    ),
}
_START_S, _PROGRAM_S = 300.0, 900.0
_SHOWN = 3000  # characters of what a program that failed has said


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """The environment variables by which clients find it."""
    model = write_tiny_model(TinyModel(hidden_size=32, context=1024, alphabet=string.printable), folder / "model", 0)
    offered = {"models": {NAME: {"path": str(model), "full": 1}}}
    (folder / "server.yaml").write_text(json.dumps(offered))
    rlix = str(Path(sys.executable).with_name("rlix"))
    command = [rlix, "serve", "--tinker", "server.yaml", "--private", "--port", "0"]
    home = {"RLIX_HOME": str(folder / "home")}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--gpus", "2"], cwd=folder, env={**os.environ, **home}, stdout=log, stderr=subprocess.STDOUT
        )
    address, deadline = folder / "home" / "tinker" / "address.json", time.monotonic() + _START_S
    try:
        while not address.is_file() or not address.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{(folder / 'server.log').read_text()[-_SHOWN:]}")
            time.sleep(0.5)
        found = json.loads(address.read_text())
        yield {"TINKER_BASE_URL": found["base_url"], "TINKER_API_KEY": found["api_key"]}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(_START_S)


def write_data(folder: Path, model: Path) -> None:
    """What the programs fetch by name: a tokenizer, and tables of a few rows."""
    for name in (NAME, FULL):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    sums = [{"question": f"What is {n} + 1?", "answer": f"One more than {n}.\n#### {n + 1}"} for n in range(32)]
    pairs = [
        {"chosen": f"\n\nHuman: Say {n}.\n\nAssistant: {n}", "rejected": f"\n\nHuman: Say {n}.\n\nAssistant: no"}
        for n in range(16)
    ]
    deep = [{"question": row["question"], "final_answer": row["answer"].split()[-1]} for row in sums]
    for name, splits, rows, config in (
        ("HuggingFaceH4/no_robots", ("train", "test"), chats, "default"),
        ("openai/gsm8k", ("train", "test"), sums, "main"),
        ("Anthropic/hh-rlhf", ("train", "test"), pairs, "default"),
        ("zwhe99/DeepMath-103K", ("train",), deep, "default"),
    ):
        place = folder / name
        place.mkdir(parents=True)
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
        (place / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
        for split in splits:
            (place / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def run(python: str, name: str, folder: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Whether it ended well with as many steps as it was to do, and what it has said."""
    module, *arguments = PROGRAMS[name].split()
    log = folder / "logs" / name.replace(", ", "-").replace(" ", "-")
    arguments.append(f"log_path={log}")
    ended = subprocess.run(
        [python, "-m", module, *arguments],
        check=False,
        cwd=folder,
        env={**os.environ, **environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=_PROGRAM_S,
    )
    said = ended.stdout + ended.stderr
    metrics = log / "metrics.jsonl"
    steps = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
    return ended.returncode == 0 and steps >= 2, said


def main() -> int:
    python, names, failed = sys.argv[1], sys.argv[2:] or list(PROGRAMS), []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with serving(folder) as environment:
            write_data(folder, folder / "model")
            for name in names:
                began = time.monotonic()
                well, said = run(python, name, folder, environment)
                sys.stdout.write(f"{name}: {'well' if well else 'FAILED'}, {time.monotonic() - began:.0f} s\n")
                sys.stdout.flush()
                if not well:
                    failed.append(name)
                    sys.stdout.write(f"{said[-_SHOWN:]}\n{(folder / 'server.log').read_text()[-_SHOWN:]}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
