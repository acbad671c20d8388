"""The tutorial's commands and the notebook's cells are typed as they stand, but for the number of steps."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Command
from tests.waiting import PROGRAM_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def few(text: str) -> str:
    return re.sub(r"\bsteps(: |=)\d+", r"steps\g<1>3", text)


def python(folder: Path, program: str) -> str:
    """What it prints."""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_tutorial(tmp_path: Path, commands: list[Command]) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    (data,) = re.findall(r"```bash\npython - <<'END'\n(.*?)END\n```", page, re.DOTALL)
    python(tmp_path, data)
    blocks = re.findall(r"```(?:python|yaml)\n(?:# (\w+\.\w+)\n)?(.*?)```", page, re.DOTALL)
    for name, text in blocks:
        if name:
            (tmp_path / name).write_text(few(text))
    job, mark, started = tmp_path / "larger.yaml", None, {}
    for line in re.findall(r"^ {4}(rlix .*)$", page, re.MULTILINE):
        words = shlex.split(line)[1:]
        beside = line in ("rlix run copy_digits", "rlix status")  # the run before them, in another terminal
        for each in () if beside else commands:
            assert each.wait() == 0, each.output()
        if "--resume" in words:
            job.write_text(job.read_text().replace("steps: 3", "steps: 5", 1))
        more = ["--set", "steps=1"] if words == ["run", "copy_digits"] else []
        command = Command(tmp_path, *words, *more, mark=mark, RLIX_IDLE_S="600")
        commands.append(command)
        mark, started[line] = command.mark, command
    assert commands[-1].wait() == 0, commands[-1].output()
    said = {line: command.output() for line, command in started.items()}
    assert list(said) == [
        "rlix check larger.yaml", "rlix run larger.yaml --gpus 4", "rlix run larger.yaml --resume",
        "rlix run copy_digits", "rlix status", "rlix report runs/larger runs/copy_digits",
        "rlix export runs/larger larger-model", "rlix down",
    ]  # fmt: skip
    assert "larger: finished, step 3/3" in said["rlix run larger.yaml --gpus 4"]
    assert "larger: goes on after step 3" in said["rlix run larger.yaml --resume"]
    assert "larger: finished, step 5/5" in said["rlix run larger.yaml --resume"]
    assert re.search(r"ended the control plane", said["rlix down"])
    assert (tmp_path / "runs" / "report.html").is_file()
    assert re.search(r"37,82=", python(tmp_path, blocks[-1][1]))
    assert commands[-1].marked() == []
    trl = subprocess.run(  # the script of TRL's page takes the tutorial's model
        [sys.executable, ROOT / "examples" / "trl_grpo.py", "larger-model", "5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert re.fullmatch(r"\[[01]\.\d+\]", trl.stdout.splitlines()[-1]), trl.stdout + trl.stderr


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIX_HOME", str(tmp_path / "home"))
    cells = json.loads((ROOT / "examples" / "first_job.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "\n".join(map(few, code)).replace('tempfile.mkdtemp(prefix="first-job-")', repr(str(tmp_path)))
    said = python(tmp_path, program)
    assert "did you mean 'max_new_tokens'?" in said
    assert re.search(r"steps +1– +3: reward 0\.\d\d", said)
    assert "larger: 3 steps, its rollouts were shrunk" in said
    assert [line[:6] for line in said.splitlines()[-3:]] == ["37,82=", "64,19=", "50,55="]
