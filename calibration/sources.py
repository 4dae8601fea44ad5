"""SOURCE, what `--dataset` takes: where text for calibration and evaluation comes from.

A source is the word `embedded`, a file (.txt, .raw, .jsonl, .parquet) or a directory saved by `datasets`. All are
local: nothing here opens a connection. Whatever the source, the result is a `Corpus` with the hash of its content, so
that a report can say which text it speaks of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..formats.errors import InputError, nearest
from . import embedded
from .embedded import EMBEDDED, Split

Message = Mapping[str, Any]
Conversation = list[Message]
Unit = Literal["document", "line", "chat"]

COLUMNS = ("text", "messages")
_SPLITS: dict[Split, tuple[str, ...]] = {"calibration": ("calibration", "train"), "test": ("test", "validation")}


@dataclass(frozen=True)
class Corpus:
    """Text with a name and a hash.

    `rows` are documents, the lines of one document (each with its newline), or conversations (lists of messages with
    `role` and `content`); `unit` says which. `sha256` is that of the text as UTF-8; for conversations, of their
    canonical JSON. `name` is the file's name without its folders.
    """

    name: str
    sha256: str
    rows: Sequence[str] | Sequence[Conversation]
    unit: Unit = "document"

    def strings(self) -> list[str]:
        """The rows of a text corpus. Raises InputError for conversations, which have no one text."""
        rows = [row for row in self.rows if isinstance(row, str)]
        if len(rows) != len(self.rows):
            raise InputError(
                f"--dataset {self.name}", "it holds conversations, not text", "give a source with `text` rows"
            )
        return rows

    def text(self) -> str:
        """The whole corpus as one string: lines as they stand, documents with an empty line between them."""
        return self.separator.join(self.strings())

    @property
    def separator(self) -> str:
        """What stands between two rows in the text."""
        return "" if self.unit == "line" else "\n\n"

    def documents(self) -> list[str]:
        """The documents of a text corpus: a file of lines is one."""
        return [self.text()] if self.unit == "line" else self.strings()


def read_source(source: str, split: Split = "calibration") -> Corpus:
    """Read the SOURCE that a user wrote.

    `split` picks the half of `embedded`, or of a saved `datasets` dictionary. Raises InputError for everything that is
    not readable text: no such file, an unknown kind of file, broken encoding or rows, no text at all.
    """
    if source == EMBEDDED:
        path = embedded.text_path(split)
        return _corpus(f"{EMBEDDED}/{path.name}", [_decode(path)], "document")
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(
            f"--dataset {source}",
            "no such file or directory",
            f"give '{EMBEDDED}', a {', '.join(_READERS)} file, or a directory saved by datasets (all local)",
        )
    if path.is_dir():
        return _corpus(path.resolve().name, *_read_saved(path, split))
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"--dataset {source}",
            f"'{path.suffix}' is not a kind of file that is read",
            nearest(path.suffix or path.name, _READERS),
        )
    return _corpus(path.name, *reader(path))


def _corpus(name: str, rows: list[Any], unit: Unit) -> Corpus:
    if not any(row.strip() if isinstance(row, str) else row for row in rows):
        raise InputError(f"--dataset {name}", "it holds no text", "give a source that is not empty")
    try:
        return _hashed(name, rows, unit)
    except UnicodeEncodeError as error:
        cause = f"it holds a character that is none ({error.reason})"
        raise InputError(f"--dataset {name}", cause, "write valid Unicode") from error


def _hashed(name: str, rows: list[Any], unit: Unit) -> Corpus:
    if unit == "chat":
        content = "\n".join(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
        return Corpus(name, hashlib.sha256(content.encode()).hexdigest(), rows, unit)
    corpus = Corpus(name, "", rows, unit)
    return Corpus(name, hashlib.sha256(corpus.text().encode()).hexdigest(), rows, unit)


def _decode(path: Path) -> str:
    """The file as text, every newline as it stands."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"--dataset {path}", f"byte {error.start} is not UTF-8 ({error.reason})", "convert the file to UTF-8"
        ) from error
    except OSError as error:
        raise InputError(f"--dataset {path}", f"it cannot be read ({error.strerror})", "check its rights") from error


def _read_txt(path: Path) -> tuple[list[Any], Unit]:
    return [_decode(path)], "document"


def _read_raw(path: Path) -> tuple[list[Any], Unit]:
    """One row a line. Only a line feed ends a line: text may hold the other characters that `splitlines` cuts at."""
    lines = _decode(path).split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else []), "line"


def _read_jsonl(path: Path) -> tuple[list[Any], Unit]:
    records: list[Any] = []
    for number, line in enumerate(_decode(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"--dataset {path}", f"line {number} is not JSON ({error})", "write one JSON object a line"
            ) from error
        if not isinstance(records[-1], dict):
            raise InputError(f"--dataset {path}", f"line {number} is not an object", "write one JSON object a line")
    column = _column(path, records[0] if records else {"text": ""})
    return _rows(path, [record.get(column) for record in records], column)


def _read_parquet(path: Path) -> tuple[list[Any], Unit]:
    import pyarrow.parquet

    try:
        column = _column(path, pyarrow.parquet.read_schema(path).names)
        values = pyarrow.parquet.read_table(path, columns=[column]).column(column).to_pylist()
    except (OSError, ValueError) as error:
        raise InputError(f"--dataset {path}", f"it is not a Parquet file ({error})", "check the file") from error
    return _rows(path, values, column)


def _read_saved(path: Path, split: Split) -> tuple[list[Any], Unit]:
    """A directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--dataset {path}", "it is not a directory saved by datasets", "write it with save_to_disk"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded[_pick_split(path, [str(name) for name in loaded], split)]
    column = _column(path, loaded.column_names)
    return _rows(path, list(loaded[column]), column)


def _pick_split(path: Path, names: list[str], split: Split) -> str:
    if len(names) == 1:
        return names[0]
    for name in _SPLITS[split]:
        if name in names:
            return name
    raise InputError(
        f"--dataset {path}", f"it has the splits {', '.join(names)}", f"save one of them as the {split} text"
    )


def _column(path: Path, names: Sequence[str] | Mapping[str, Any]) -> str:
    for column in COLUMNS:
        if column in names:
            return column
    found = ", ".join(names) or "nothing"
    raise InputError(f"--dataset {path}", f"its rows have {found}", "name the column `text` or `messages`")


def _rows(path: Path, values: list[Any], column: str) -> tuple[list[Any], Unit]:
    """Values of one column, each checked to be what the column promises."""
    right = _is_conversation if column == "messages" else _is_text
    for number, value in enumerate(values, start=1):
        if not right(value):
            shape = "a list of {role, content} objects" if column == "messages" else "a string"
            raise InputError(f"--dataset {path}", f"`{column}` of row {number} is not {shape}", "correct the row")
    return values, "chat" if column == "messages" else "document"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value) and value != []


_READERS: dict[str, Callable[[Path], tuple[list[Any], Unit]]] = {
    ".txt": _read_txt,
    ".raw": _read_raw,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
