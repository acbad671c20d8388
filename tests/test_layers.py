"""The arrows of docs/architecture.md: a layer imports only from itself and from below; starting up imports no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "rlix"

ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "node": {"protocol"},
    "scheduler": {"protocol"},
    "control": {"scheduler", "node", "protocol"},
    "workers": {"control", "node", "protocol"},
    "flow": {"engine", "workers", "control", "node", "protocol"},
    "nn": {"protocol"},
    "engine": {"nn", "workers", "control", "node", "protocol"},
    "pipeline": {"flow", "nn", "engine", "workers", "control", "node", "scheduler", "protocol", "monitor"},
    "monitor": {"protocol"},
    "sim": {"control", "scheduler", "protocol"},
    "integrations": {"pipeline", "nn", "engine", "control", "node", "protocol"},
    "serve": {"pipeline", "engine", "control", "node", "monitor", "scheduler", "protocol"},
    "trl": {"integrations"},
    "examples": {"pipeline", "nn", "engine", "flow", "control", "protocol"},
    "cli": {"serve", "pipeline", "flow", "workers", "control", "node", "monitor", "sim", "scheduler", "protocol"},
}

PURE_FORBIDS = {
    "ray",
    "torch",
    "transformers",
    "time",
    "datetime",
    "os",
    "io",
    "socket",
    "threading",
    "asyncio",
    "random",
}


def imported_modules(path: Path) -> set[str]:
    """Every absolute module name that a file imports anywhere, functions included."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            module = node.module or ""
            modules.add(module)
            if module == "rlix":  # `from rlix import control` reaches the layer by attribute
                modules.update(f"rlix.{alias.name}" for alias in node.names)
    return modules


def files_of(layer: str) -> list[Path]:
    return sorted([*(SOURCE / layer).rglob("*.py"), *SOURCE.glob(f"{layer}.py")])


def test_every_layer_is_listed() -> None:
    found = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    found |= {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert found <= set(ALLOWED), f"add to ALLOWED, with what they may import: {sorted(found - set(ALLOWED))}"


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_arrows_point_down(layer: str) -> None:
    wrong = []
    for path in files_of(layer):
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "rlix" and len(parts) > 1 and parts[1] not in ALLOWED[layer] | {layer}:
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layer", ["protocol", "scheduler"])
def test_the_brain_is_pure(layer: str) -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in files_of(layer)
        for module in imported_modules(path)
        if module.split(".")[0] in PURE_FORBIDS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module",
    [
        *("rlix", "rlix.protocol", "rlix.scheduler", "rlix.control", "rlix.monitor"),
        *("rlix.cli.main", "rlix.cli.jobs", "rlix.cli.run", "rlix.pipeline.jobs.job_coordinator"),
    ],
)
def test_start_up_imports_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = sorted({'torch', 'transformers', 'vllm', 'datasets', 'pandas'} & set(sys.modules))\n"
        "sys.exit(f'imported at start-up: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def test_help_imports_no_ray() -> None:
    code = "import sys, rlix.cli.main; sys.exit('imported: ray' if 'ray' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def modules_of(package: Path) -> dict[str, Path]:
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_within(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of `modules` that a file imports by name, those for type checking and inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & modules.keys()) or {node.module}
    return found & modules.keys()


def circles(below: dict[str, set[str]]) -> list[list[str]]:
    """The sets of more than one module that all reach each other (Tarjan, "Depth-first search and linear graph
    algorithms", 1972)."""
    found: list[list[str]] = []
    number: dict[str, int] = {}
    open_: list[str] = []

    def visit(name: str) -> int:
        first = number[name] = len(number)
        open_.append(name)
        for other in below[name]:
            if other not in number:
                first = min(first, visit(other))
            elif other in open_:
                first = min(first, number[other])
        if first == number[name]:
            at = open_.index(name)
            if len(open_) - at > 1:
                found.append(sorted(open_[at:]))
            del open_[at:]
        return first

    for name in below:
        if name not in number:
            visit(name)
    return sorted(found)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": set()}) == []
    two = {"a": {"b"}, "b": {"c", "e"}, "c": {"a"}, "d": {"a", "d"}, "e": {"f"}, "f": {"e"}}
    assert circles(two) == [["a", "b", "c"], ["e", "f"]]


def test_no_modules_import_each_other() -> None:
    """Not even inside functions or for types: what needs each other is one module, or lacks a third one below both."""
    modules = {name: path for name, path in modules_of(SOURCE).items() if path.name != "__init__.py"}
    below = {name.removeprefix("rlix."): imports_within(path, modules) for name, path in modules.items()}
    below = {name: {other.removeprefix("rlix.") for other in imports} for name, imports in below.items()}
    assert circles(below) == []
