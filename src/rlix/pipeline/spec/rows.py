"""What is wrong with the rows of a user's files, by file and line as an editor counts them; no library is loaded."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlix.pipeline.spec.columns import FORMATS, data_fields
from rlix.pipeline.spec.runs import run_of
from rlix.pipeline.spec.sections import Sections
from rlix.pipeline.spec.source import DataSpec, TableSpec
from rlix.protocol.spec_file import Problem

SHOWN = 5
"""So many rows of a table are named; of further ones it is said how many they are."""
_LONGEST_FIELD = 2**31 - 1  # of CSV, in bytes
_TEXT = 60  # characters of a value that is wrong


@dataclass(frozen=True, slots=True)
class Line:
    """A row, where it is in its file (the line that it begins on, or of a list its number), and what is wrong with it
    as it stands ("" when nothing is)."""

    number: int
    row: dict[str, Any]
    problem: str = ""
    of_list: bool = False

    def at(self, path: object) -> str:
        return f"{path}: row {self.number}" if self.of_list else f"{path}:{self.number}"


def first_few(problems: Iterable[str]) -> list[str]:
    """Those that are named, and how many others there are; "" is one that says nothing that was not said."""
    named, more = list[str](), 0
    for problem in problems:
        if problem and len(named) < SHOWN:
            named.append(problem)
        else:
            more += 1
    return [*named, *others(more)]


def others(count: int) -> list[str]:
    """What is said of rows that are not named."""
    return [f"and {count:,} more that cannot be used"] if count else []


def row_problems(spec: Sections, most_bytes: int | None = None) -> Iterator[Problem]:
    """What is wrong with rows of the job's files: torn lines, cells that are empty, characters that the built-in model
    does not know. Tables that are no file of lines are looked at when they are loaded.

    Args:
        most_bytes: of a file that is looked into; None: any.
    """
    alphabet = set(spec.model.alphabet) if spec.model.kind == "tiny" and spec.source.chat.template is None else None
    if spec.source.data is not None:
        yield from _of_tables("", spec.source.data, alphabet, most_bytes)
    for at, given in (("source", spec.source), ("warmup", spec.warmup)):
        if given is not None and given.conversations is not None:
            path = Path(given.conversations.path)
            if path.is_file() and (most_bytes is None or path.stat().st_size <= most_bytes):
                for message in broken_lines(path):
                    yield Problem(f"{at}.conversations.path", message)
    for where, own in (spec.evaluation.by_field if spec.evaluation else {}).items():
        if own.source and own.source.data is not None:
            yield from _of_tables(f"{where}.", own.source.data, alphabet, most_bytes)
    for name, run in spec.runs.items():
        if "source" in run.model_fields_set:
            for problem in row_problems(run_of(spec, name, run), most_bytes):
                yield Problem(f"runs.{name}.{problem.field}", problem.message)


def _of_tables(section: str, data: DataSpec, alphabet: set[str] | None, most_bytes: int | None) -> Iterator[Problem]:
    for where, table in data_fields(data):
        path = Path(table.path)
        if path.is_file() and (most_bytes is None or path.stat().st_size <= most_bytes):
            for message in first_few(_unusable(table, alphabet)):
                yield Problem(f"{section}{where}.path", message)


def _unusable(table: TableSpec, alphabet: set[str] | None) -> Iterator[str]:
    """A character that is unknown is named once."""
    named: set[str] = set()
    for line in lines_of(Path(table.path)):
        if problem := line.problem or _row_problem(table, line.row):
            yield f"{line.at(table.path)}: {problem}"
        elif alphabet is not None and (unknown := _unknown(table, line.row, alphabet, named)) is not None:
            yield f"{line.at(table.path)}: {unknown}" if unknown else ""


def broken_lines(path: Path) -> list[str]:
    """The lines of a file that are no rows, the first few by number."""
    return first_few(f"{line.at(path)}: {line.problem}" for line in lines_of(path) if line.problem)


def place(path: str, row: int) -> str:
    """What to call row `row` (from 0) of a table: file and line where that is known, else its number from 1."""
    for number, line in enumerate(lines_of(Path(path))):
        if number == row:
            return line.at(path)
    return f"{path}: row {row + 1}"


def lines_of(path: Path) -> Iterator[Line]:
    """The rows of a file of text; nothing of other tables."""
    kind = FORMATS.get(path.suffix) if path.is_file() else None
    if kind == "csv":
        yield from _csv_lines(path)
    elif kind == "json":
        yield from (_list_lines if path.suffix == ".json" and _is_list(path) else _json_lines)(path)


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _list_lines(path: Path) -> Iterator[Line]:
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Line(1, {}, f"is not UTF-8 ({error.reason}); save the file as UTF-8")
    except json.JSONDecodeError as error:
        yield Line(error.lineno, {}, f"is no JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        yield Line(1, {}, "is nested too deeply")
    else:
        for number, row in enumerate(rows, start=1):
            yield _as_line(number, row, of_list=True)


def _as_line(number: int, row: object, *, of_list: bool = False) -> Line:
    if isinstance(row, dict):
        return Line(number, row, of_list=of_list)
    return Line(number, {}, f"is a {type(row).__name__}, no JSON object", of_list)


def _json_lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
            except UnicodeDecodeError as error:
                yield Line(number, {}, f"is not UTF-8 ({error.reason}); save the file as UTF-8")
            except json.JSONDecodeError as error:
                yield Line(number, {}, f"is no JSON object: {error.msg} (column {error.colno})")
            except RecursionError:
                yield Line(number, {}, "is nested too deeply")
            else:
                yield _as_line(number, row)


def _csv_lines(path: Path) -> Iterator[Line]:
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        columns: list[str] | None = None
        for number, row in _csv_rows(file):
            if isinstance(row, str):
                yield Line(number, {}, row)
            elif columns is None:
                columns = row
            elif any("\udc80" <= c <= "\udcff" for cell in row for c in cell):
                yield Line(number, {}, "is not UTF-8; save the file as UTF-8")
            elif len(row) > len(columns):
                what = f"has {len(row)} fields, and the table {len(columns)} columns; quote what holds a comma"
                yield Line(number, {}, what)
            else:
                yield Line(number, dict(zip(columns, row, strict=False)))


def _csv_rows(file: IO[str]) -> Iterator[tuple[int, list[str] | str]]:
    """Rows by the line that they begin on, and what is wrong where there is none."""
    reader, begin = csv.reader(file, strict=True), 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            what = "its quotation mark is never closed" if "end of data" in str(error) else str(error)
            yield begin, f"is no row of CSV: {what}"
            return
        if row is None:
            return
        if len(row) > 1 or any(map(str.strip, row)):  # pandas passes over a line of spaces, too
            yield begin, row
        begin = reader.line_num + 1


def _row_problem(table: TableSpec, row: dict[str, Any]) -> str:
    """What of a row a job cannot use, as far as that shows without the model's tokenizer."""
    for column in filter(None, (table.prompt, table.answer)):
        value = row.get(column)
        if value is None or (column == table.prompt and not value):
            return f"column {column!r} is empty"
    return ""


def _unknown(table: TableSpec, row: dict[str, Any], alphabet: set[str], named: set[str]) -> str | None:
    """What of a row is no text of the alphabet; "" when it has `named` characters alone, to which others are added."""
    known = None
    for column in filter(None, (table.prompt, table.answer)):
        value = row[column]
        if column == table.prompt and not isinstance(value, str):
            return f"column {column!r} holds a {type(value).__name__}; without a chat template it is text"
        unknown = set(value) - alphabet if isinstance(value, str) else set()
        if unknown - named:
            named |= unknown
            return f"model.alphabet does not have {''.join(sorted(unknown))!r} of {value[:_TEXT]!r}; add it there"
        known = "" if unknown else known
    return known
