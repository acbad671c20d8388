"""The manual says what the code does."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.spec_file import read_yaml

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_job_spec_reference_is_current() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "job_spec.py"))
    assert script["TARGET"].read_text() == script["reference"](), "run `python docs/job_spec.py`"


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_every_page_is_in_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+)", (ROOT / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= linked


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
