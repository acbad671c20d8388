"""The manual says what the code does."""

import ast
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import rlix.flow
from benchmarks import demo
from rlix.cli.main import app
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.protocol.spec_file import read_yaml

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def task_pages() -> list[str]:
    """Pages of mkdocs.yml that say how something is done."""
    parts = re.findall(r"^  - ([\w ]+):\n((?: {6}- .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [re.findall(r"- (.+)", listed) for part, listed in parts if part in ("Tasks", "Jobs", "Before and after")]
    return sorted({page for listed in pages for page in listed} - {"algorithms.md"})


def test_the_reference_is_current() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "reference.py"))["PAGES"]
    old = [name for name, write in pages.items() if (ROOT / "docs" / name).read_text() != write()]
    assert not old, "run `python docs/reference.py`"


@pytest.mark.parametrize("name", ["algorithms", "data", "environments", "custom-pipelines"])
def test_what_the_manual_shows_of_a_job_is_one(name: str, tmp_path: Path) -> None:
    whole = {"name": "shown", "steps": 1, "clusters": {"actor_train": {"gpus": 2}}, "rollout": {"max_new_tokens": 5}}
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "job.yaml").write_text(block)
        shown, _ = read_yaml(tmp_path / "job.yaml")
        values = {**whole, **shown, "rollout": {**whole["rollout"], **shown.get("rollout", {})}}
        JobSpec.model_validate_json(json.dumps({"source": {"task": "sort_digits"}, **values}))


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", FENCED.sub("", page.read_text()))
    missing = [
        path + anchor
        for path, anchor in targets
        if "://" not in path and not leads(page.parent / path if path else page, anchor.removeprefix("#"))
    ]
    assert not missing


def leads(file: Path, anchor: str) -> bool:
    return file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(file))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


def test_every_page_has_its_place() -> None:
    start = set(re.findall(r"\]\(([^)#/]+\.md)", (ROOT / "docs" / "index.md").read_text())) | {"index.md"}
    site = set(re.findall(r"^ +- (.+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in DOCS} == start == site


@pytest.mark.parametrize("page", task_pages())
def test_a_task_page_is_read_in_minutes(page: str) -> None:
    """At most 600 words, beside code and tables. What `algorithms.md` has to list is no task."""
    text = FENCED.sub("", (ROOT / "docs" / page).read_text())
    prose = [line for line in text.splitlines() if not line.startswith(("    ", "|"))]
    assert len(" ".join(prose).split()) <= 600


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each `rlix ...` that a page tells to type, with the page."""
    for page in PAGES:
        text = page.read_text()
        blocks = [block for kind, block in FENCED.findall(text) if kind in ("", "bash")]
        blocks += re.findall(r"(?:^ {4}.*\n)+", FENCED.sub("", text), re.MULTILINE)
        for line in "\n".join(blocks).splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True) if line.strip()[:1] in "$rR" else []
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words[:1] == ["rlix"]:
                yield page.name, words[1:]


def test_the_commands_of_the_manual_are_commands() -> None:
    group: Any = typer.main.get_command(app)
    wrong = []
    for page, words in commands():
        command, rest = group, words
        while rest and hasattr(command, "commands") and rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        if "--" in rest:
            rest = rest[: rest.index("--")]
        try:
            command.make_context("rlix", list(rest), resilient_parsing=False)
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{page}: rlix {' '.join(words)}: {error!r}")
    named = {name for page in PAGES for name in re.findall(r"`rlix ([a-z][a-z-]*)", page.read_text())}
    assert not wrong
    assert len(named) > 20
    assert not named - set(group.commands)


def test_the_messages_of_troubleshooting_are_there() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = [
        text for row in re.findall(r"^\| ([^|]*)\|", page, re.MULTILINE) for text in re.findall(r"`(.+?)`", row)
    ]
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", code)  # of texts over several lines
    assert messages
    assert not [text for text in messages if text not in joined]


def test_the_metrics_of_the_manual_are_metrics() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    columns = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    names = {name for column in columns for name in re.findall(r"`(?:eval/)?([a-z_]+)`", column)}
    assert len(names) > 40
    assert not names - set(re.findall(r"\w+", code))


def test_what_programs_import_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    paths = [path.rpartition(".") for path in re.findall(r"^::: (\S+)", page, re.MULTILINE)]
    assert not [f"{module}.{name}" for module, _, name in paths if name not in defined(module)]
    shown = {name for _, _, name in paths}
    names = {*rlix.__all__, *rlix.flow.__all__} - {
        "nn",
        "pipeline",
        "protocol",
        "device",
        "__version__",
        "Mode",
        "JobSpec",
    }
    assert {name for name in names if not name.endswith("Error")} <= shown


def test_the_demo_of_the_readme_is_one_run() -> None:
    found = json.loads(demo.RECORD.read_text())
    readme = demo.README.read_text()
    assert readme == demo.in_readme(readme, found), "run `make picture`"
    assert demo.PICTURE.read_text() == demo.picture(found), "run `make picture`"


def test_the_demo_refuses_real_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "device_keys", lambda: ("GPU-1",))
    monkeypatch.setattr(sys, "argv", ["demo"])
    with pytest.raises(SystemExit, match="2"):
        demo.main()
    assert "this machine has GPUs" in capsys.readouterr().err


def test_what_the_tutorial_and_the_notebook_begin_with_is_a_job(tmp_path: Path) -> None:
    """And the same one, but for its length."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    files = dict(re.findall(r"```(?:python|yaml)\n# (\w+\.\w+)\n(.*?)```", page, re.DOTALL))
    (tmp_path / "larger.jsonl").write_text(json.dumps({"prompt": "10,11=", "answer": "11"}) + "\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    job = load_job(tmp_path / "larger.yaml")
    cells = json.loads((ROOT / "examples" / "first_job.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    texts = {
        name: text
        for name, _, text in re.findall(r'"([\w.]+)"\)\.write_text\(("""|\'\'\')\n(.*?)\2\)', code[0], re.DOTALL)
    }
    assert texts["rewards.py"].strip() == files["rewards.py"].strip()
    (tmp_path / "larger.yaml").write_text(texts["larger.yaml"])
    same = {"steps": job.steps, "checkpoint": job.checkpoint}
    assert load_job(tmp_path / "larger.yaml").model_copy(update=same) == job


def defined(module: str) -> set[str]:
    """The names in a module of ours, without importing it."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {child.stem for child in path.iterdir()} if path.is_dir() else set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name for alias in node.names}
            case ast.Assign() | ast.AnnAssign():
                found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                found |= {text.value for text in ast.walk(node) if isinstance(text, ast.Constant)}  # of `__all__`
    return found


def test_what_examples_and_the_manual_import_is_there() -> None:
    programs = {path.name: path.read_text() for path in sorted((ROOT / "examples").rglob("*.py"))}
    for path in (ROOT / "examples").rglob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        programs[path.name] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for page in PAGES:
        programs[page.name] = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    missing = [
        f"{name}: {module}.{each}"
        for name, text in programs.items()
        for module, imported in re.findall(r"^ *from (rlix[\w.]*) import ([\w, ]+)", text, re.MULTILINE)
        for each in imported.split(", ")
        if each.strip() not in defined(module)
    ]
    assert not missing
