"""What a table of prompts must have, found without reading more of it than its head."""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlix.pipeline.spec.source import ConversationsSpec, DataSpec, TableSpec
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import Problem, nearest

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""What `datasets` calls the kinds of file."""
_OTHER_FILES = (".tsv", ".txt", ".gz", ".zip", ".zst", ".xz", ".bz2", ".xls", ".xlsx", ".ndjson", ".pkl", ".arrow")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_path(given: str) -> bool:
    """Whether it can be no name on the hub."""
    suffix = Path(given).suffix
    return given.startswith((".", "~", "/")) or suffix in FORMATS or suffix in _OTHER_FILES or not is_hub_name(given)


def is_hub_name(given: str) -> bool:
    """Whether it has the form of a name on the Hugging Face hub, of a model or of a data set."""
    return _HUB_NAME.fullmatch(given) is not None


def data_fields(data: DataSpec) -> list[tuple[str, TableSpec]]:
    """Each table and where the job's file says it."""
    if data.mix:
        return [(f"source.data.mix.{number}", table) for number, table in enumerate(data.mix)]
    return [("source.data", data)]


def column_problems(data: DataSpec) -> Iterator[Problem]:
    """What is wrong with files or their columns, found without reading more of them than their heads.

    Tables on the hub, and folders of files, are looked at when they are loaded.
    """
    for where, table in data_fields(data):
        yield from _table_problems(where, table, _asked_of(table))


def conversation_problems(where: str, given: ConversationsSpec, *, pairs: bool) -> Iterator[Problem]:
    """The same of a table of conversations."""
    yield from _table_problems(where, given.table, given.needed(pairs=pairs))


def _asked_of(table: TableSpec) -> dict[str, str]:
    """The columns that a table of prompts must have, by the field that names them."""
    return {"prompt": table.prompt} | ({} if table.answer is None else {"answer": table.answer})


def _table_problems(where: str, table: TableSpec, needed: Mapping[str, str]) -> Iterator[Problem]:
    if find_spec("datasets") is None:
        yield Problem(where, "needs the package datasets; run 'pip install rlix[data]'")
        return
    path = Path(table.path)
    if not path.exists():
        if is_path(table.path):
            beside = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
            yield Problem(f"{where}.path", f"there is no file or folder {path}{nearest(str(path), beside)}")
        return
    if path.is_file():
        for field in ("split", "config"):
            if getattr(table, field) != TableSpec.model_fields[field].default:
                yield Problem(f"{where}.{field}", f"{path.name} is one file, which has none; leave it out")
    try:
        columns = _columns(path, table.split)
    except SpecError as error:
        yield Problem(f"{where}.path", str(error))
        return
    except UnicodeDecodeError as error:
        yield Problem(f"{where}.path", f"{path} is not a text file in UTF-8 ({error.reason}); save it as UTF-8")
        return
    except OSError as error:
        yield Problem(f"{where}.path", f"{path} cannot be read: {error.strerror}")
        return
    if columns is not None:
        yield from missing_columns(where, table, columns, needed)


def missing_columns(
    where: str, table: TableSpec, columns: Sequence[str], needed: Mapping[str, str] | None = None
) -> Iterator[Problem]:
    """Those of a table of prompts, or that are `needed`, by the field that names them, and the table lacks."""
    for field, column in (_asked_of(table) if needed is None else needed).items():
        if column not in columns:
            yield Problem(
                f"{where}.{field}",
                f"{Path(table.path).name} has no column {column!r}; its columns are "
                f"{', '.join(columns)}{nearest(column, columns)}",
            )


def known_columns(table: TableSpec) -> Sequence[str] | None:
    """None where they are not known before the table is loaded, or something is wrong with it."""
    path = Path(table.path)
    try:
        return _columns(path, table.split) if path.exists() else None
    except (SpecError, OSError, UnicodeDecodeError):
        return None


def is_saved(path: Path) -> bool:
    """Whether the folder was written by `Dataset.save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def kinds(folder: Path) -> set[str]:
    """How the names of its tables end."""
    return {file.suffix for file in folder.rglob("*")} & FORMATS.keys()


def _columns(path: Path, split: str) -> list[str] | None:
    """None where they are looked at when the table is loaded: of a folder of files, and of one list in JSON."""
    if path.is_dir():
        if is_saved(path):
            return _saved_columns(path, split)
        if kinds(path):
            return None
        raise SpecError(f"{path} was not saved by datasets (Dataset.save_to_disk), and holds no {', '.join(FORMATS)}")
    match FORMATS.get(path.suffix):
        case "parquet":
            return _parquet_columns(path)
        case "csv":
            return _csv_columns(path)
        case "json":
            return _json_columns(path)
    raise SpecError(
        f"{path} is of a kind that is not known; use {', '.join(FORMATS)}, or a folder of them or saved by datasets"
    )


def _csv_columns(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:  # Excel puts a mark before the first name
        rows = (row for row in csv.reader(file) if row)
        columns = next(rows, None)
        try:
            first = next(rows, None)
        except csv.Error:  # a field is longer than this reader takes; the one that loads the table takes it
            first = []
    if columns is None:
        raise SpecError(f"{path} is empty")
    if first is None:
        raise SpecError(f"{path} holds no rows")
    if len(columns) == 1 and (found := next((c for c in ";\t|" if c in columns[0]), None)):
        raise SpecError(f"{path} has {found!r} between its columns {columns[0]!r}; save it with commas")
    if len(first) > len(columns):  # pandas would take the first fields for the names of rows
        raise SpecError(
            f"{path} has {len(columns)} columns, and {len(first)} in its first row; quote what holds a comma"
        )
    return columns


def _json_columns(path: Path) -> list[str] | None:
    with path.open(encoding="utf-8-sig") as file:
        first = next((line for line in file if line.strip()), None)
    if first is None:
        raise SpecError(f"{path} is empty")
    if path.suffix == ".json" and first.lstrip().startswith("["):
        return None
    try:
        row = json.loads(first)
    except ValueError as error:
        raise SpecError(f"{path} does not hold one JSON object per line; its first line: {error}") from error
    if not isinstance(row, dict):
        raise SpecError(f"{path} does not hold one JSON object per line; its first line is a {type(row).__name__}")
    return list(row)


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow.parquet
    from pyarrow.lib import ArrowInvalid

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise SpecError(f"{path} is not a Parquet file: {error}") from error
    if file.metadata.num_rows == 0:
        raise SpecError(f"{path} holds no rows")
    return list(file.schema_arrow.names)


def _saved_columns(path: Path, split: str) -> list[str]:
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text())["splits"]
        if split not in names:
            raise SpecError(f"{path} has no split {split!r}; it has {', '.join(names)}; set source.data.split")
        path = path / split
    info = path / "dataset_info.json"
    return list(json.loads(info.read_text())["features"])
