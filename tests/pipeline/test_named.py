"""What a user names: files and modules, options that the thing named checks, whole jobs made of a user's parts."""

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray import cloudpickle

from rlix.pipeline.jobs.coordinator import check_importable, resolve_pipeline
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.pipeline.spec.named import import_object, option_problems, parse_options
from rlix.protocol.errors import SpecError
from tests.pipeline import own_parts
from tests.pipeline.in_process import InProcess

PARTS = Path(own_parts.__file__)
AT = r" \(.*parts\.py:\d+\)$"


class Model(BaseModel):
    size: int = 1


@dataclass
class Plain:
    size: int
    names: tuple[str, ...] = ()


def function(first: object, *, size: int = 1, rate: float = 0.5, hook: Any = print) -> None: ...


class Owner:
    def __init__(self, options: Any) -> None:
        self.Options = options


def problems(found: object, options: dict[str, Any], given: int = 0) -> list[str]:
    return [f"{p.field}: {p.message}" for p in option_problems("x.options", found, options, given)]


class TestOptions:
    def test_are_what_the_thing_named_takes(self) -> None:
        assert parse_options(Owner(Model), {"size": 3}) == Model(size=3)
        assert parse_options(Owner(Plain), {"size": 3, "names": ["a"]}) == Plain(3, ("a",))
        assert parse_options(function, {"rate": 1}, given=1) == {"rate": 1.0}
        assert parse_options(lambda **_: None, {"anything": "goes"}) == {"anything": "goes"}

    @pytest.mark.parametrize("found", [Owner(Model), Owner(Plain), function])
    def test_what_does_not_fit_is_said_by_field(self, found: Any) -> None:
        given = 1 if found is function else 0
        (problem,) = problems(found, {"size": "3"}, given)
        assert problem == "x.options.size: must be a valid integer, not '3'"
        assert "x.options.sise: unknown key; did you mean 'size'?" in problems(found, {"sise": 3}, given)
        with pytest.raises(ValidationError):
            parse_options(found, {"size": "3"}, given)

    def test_what_is_missing_is_said(self) -> None:
        assert problems(Owner(Plain), {}) == ["x.options.size: is missing and has no default; add it"]


class TestFiles:
    def test_a_file_is_loaded_once_and_travels_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.py"
        path.write_text("OFFSET = 3\n\ndef shifted(x):\n    return x + OFFSET\n")
        found: Any = import_object(f"{path}:shifted")
        assert found is import_object(f"{path}:shifted")
        sent = cloudpickle.dumps(found)
        path.unlink()
        assert b"shifted" in sent
        assert pickle.loads(sent)(4) == 7

    @pytest.mark.parametrize(
        ("text", "name", "message"),
        [
            (None, "f", r"there is no file .*gone\.py; did you mean '.*gine\.py'\?"),
            ("def ff(): ...", "fff", r"has no 'fff'; did you mean 'ff'\?"),
            ("x = 1\ny = 1 / 0\n", "x", r"cannot be imported: ZeroDivisionError: .* \(.*gone\.py:2\)"),
            ("def f(:\n", "f", r"cannot be imported: SyntaxError: .*line 1"),
            ("import sys\nsys.exit()\n", "f", r"cannot be imported: SystemExit: .* \(.*gone\.py:2\)"),
        ],
    )
    def test_what_is_wrong_with_a_file_is_said(self, tmp_path: Path, text: str | None, name: str, message: str) -> None:
        (tmp_path / "gine.py").write_text("")
        if text is not None:
            (tmp_path / "gone.py").write_text(text)
        with pytest.raises(SpecError, match=message):
            import_object(f"{tmp_path / 'gone.py'}:{name}")


def spec_file(folder: Path, **changes: Any) -> Path:
    values = {
        "name": "own",
        "steps": 2,
        "source": {"task": "sort_digits"},
        "model": {"hidden_size": 16, "layers": 1, "heads": 2},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 5},
        "clusters": {"actor_train": {"gpus": 1}},
    }
    (folder / "parts.py").write_text(PARTS.read_text())
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "parts.py:Best", "options": {"sharpness": 2.0}}},
        {"source": {"task": {"name": "parts.py:Count", "options": {"up_to": 2}}}},
        {"source": "parts.py:Fixed"},
        {"schedule": "parts.py:Twice"},
    ],
    ids=["algorithm", "task", "source", "schedule"],
)
def test_a_users_part_works_with_all_that_ships(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = load_job(spec_file(tmp_path, **changes))
    assert str(tmp_path / "parts.py") in spec.to_yaml()
    again = tmp_path / "again.yaml"
    again.write_text(spec.to_yaml())
    assert load_job(again) == spec
    rows = InProcess(spec, tmp_path).run_steps()
    assert [row["trajectories"] for row in rows] == [8, 8]
    assert all(row["grad_norm"] > 0 for row in rows)


def test_options_name_files_too(tmp_path: Path) -> None:
    environment = {"name": "gym", "options": {"id": "FrozenLake-v1", "adapter": "parts.py:Best", "suffix": "x:y"}}
    spec = load_job(spec_file(tmp_path, source={"environment": environment}))
    assert spec.source.environment is not None
    options = {"id": "FrozenLake-v1", "adapter": f"{tmp_path}/parts.py:Best", "suffix": "x:y"}
    assert spec.source.environment.options == options


def test_a_users_pipeline_with_options(tmp_path: Path) -> None:
    spec = load_job(spec_file(tmp_path, pipeline={"name": "parts.py:Noted", "options": {"note": 2.5}}))
    check_importable(spec)
    found = resolve_pipeline(spec)
    assert found.__name__ == "Noted"
    assert spec.pipeline is not None
    assert parse_options(found, spec.pipeline.options).note == 2.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "parts.py:Best"}, r"job\.yaml:1: algorithm\.options\.sharpness: is missing.*" + AT),
        ({"algorithm": "parts.py:Bestt"}, r"algorithm\.name: .* has no 'Bestt'; did you mean 'Best'\?"),
        ({"source": {"task": {"name": "parts.py:Count", "options": {"upto": 2}}}}, r"did you mean 'up_to'\?"),
        ({"pipeline": {"name": "parts.py:Noted", "options": {"note": "x"}}}, r"pipeline\.options\.note: must be a val"),
        (
            {"schedule": {"name": "parts.py:Twice", "options": {"n": 2}}},
            r"schedule\.options: .* has no class 'Options'",
        ),
        ({"pipeline": "parts.py:Count"}, r"pipeline\.name: .* not a subclass of rlix\.pipeline\.Pipeline" + AT),
        ({"algorithm": "parts.py:plays"}, r"algorithm\.name: .* not a subclass of rlix\.pipeline\.algorithms\.Alg"),
        (
            {"schedule": "parts.py:Best"},
            r"schedule\.name: .* not a subclass of rlix\.pipeline\.schedules\.Schedule" + AT,
        ),
        ({"source": "parts.py:Best"}, r"source\.name: .* not a subclass of rlix\.pipeline\.sources\.Source" + AT),
        ({"algorithm": "parts.py:Algorithm"}, r"algorithm\.name: .* has no estimate; write it$"),
        ({"source": {"openai": "parts.py:plays"}}, r"source\.openai\.options\.more: is missing.*" + AT),
        ({"source": {"task": "parts.py:Best"}}, r"source\.task\.name: .* not a subclass of rlix\.pipeline\.sources\.t"),
        (
            {"source": {"environment": "parts.py:Answer"}},
            r"environment\.name: .* has no reset and no step and",
        ),
    ],
)
def test_mistakes_in_what_is_named_are_found_before_the_start(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message):
        load_job(spec_file(tmp_path, **changes))


REWARDS = """
def two(prompt, completion): ...
def wants(prompt, completion, answer, *, level, limit=3): ...
"""


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "r.py:two",
            r"rewards\.0\.name: .*:two is called with prompt, completion and answer, and",
        ),
        ("r.py:wants", r"rewards\.0\.name: .*:wants needs 'level', .* nor a column of rows\.jsonl \(prompt, answer\)"),
        ({"name": "r.py:wants", "options": {"level": 3}}, None),
        (["exact_match", "number_match", "token_match"], None),
    ],
)
def test_a_reward_that_cannot_be_called_is_found_before_the_start(
    reward: Any, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n')
    path = spec_file(tmp_path, source={"data": {"path": "rows.jsonl"}, "rewards": reward})
    if message is None:
        load_job(path)
    else:
        with pytest.raises(SpecError, match=message):
            load_job(path)


def test_a_file_that_is_being_loaded_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate: Any = SimpleNamespace(entered=threading.Event(), go=threading.Event())
    monkeypatch.setitem(sys.modules, "gate", gate)
    file = tmp_path / "slow.py"
    file.write_text("import gate\ngate.entered.set()\ngate.go.wait(300)\nlast = 7\n")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(import_object, f"{file}:last")
        assert gate.entered.wait(300.0)
        second = pool.submit(import_object, f"{file}:last")
        wait([second], 0.2)  # half a module would be found at once
        gate.go.set()
        assert (first.result(300.0), second.result(300.0)) == (7, 7)


def test_a_spec_made_in_python_names_modules_too() -> None:
    name = "tests.pipeline.own_parts:Best"
    spec = JobSpec.model_validate(
        {
            "name": "own",
            "steps": 1,
            "source": {"task": "sort_digits"},
            "algorithm": {"name": name, "options": {"sharpness": 1.0}},
            "rollout": {"max_new_tokens": 5},
            "clusters": {"actor_train": {"gpus": 1}},
        }
    )
    assert list(spec.clusters_in_use) == ["actor_train", "actor_infer"]
