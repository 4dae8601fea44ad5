"""Every kind of SOURCE is read, hashed and named; every fault of one is the user's to read."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from compress_llm.calibration import embedded
from compress_llm.calibration.sources import read_source
from compress_llm.formats.errors import InputError

TALK = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], [{"role": "user", "content": "x"}]]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def write(file: Path, content: str | bytes) -> str:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_embedded_has_two_splits() -> None:
    calibration, test = read_source("embedded"), read_source("embedded", "test")
    assert (calibration.name, test.name) == ("embedded/wiki-calib.txt", "embedded/wiki-test.txt")
    assert test.sha256 == hashlib.sha256(embedded.text_path("test").read_bytes()).hexdigest()
    assert len(calibration.rows) == 1


def test_txt_is_one_document_with_its_newlines_as_they_stand(tmp_path: Path) -> None:
    content = "a\r\nb\n\n c"
    corpus = read_source(write(tmp_path / "A.TXT", content))
    assert (corpus.name, corpus.rows, corpus.text()) == ("A.TXT", [content], content)
    assert corpus.sha256 == hashlib.sha256(content.encode()).hexdigest()


def test_raw_is_a_row_a_line_and_only_a_line_feed_ends_one(tmp_path: Path) -> None:
    content = " = T = \n \nx\u2028y\x0cz\r\n\nlast"
    corpus = read_source(write(tmp_path / "a.raw", content))
    assert corpus.rows == [" = T = \n", " \n", "x\u2028y\x0cz\r\n", "\n", "last"]
    assert corpus.text() == content
    assert corpus.documents() == [content]
    assert read_source(write(tmp_path / "b.raw", "a\nb\n")).rows == ["a\n", "b\n"]


def test_jsonl_text_rows_are_documents(tmp_path: Path) -> None:
    corpus = read_source(write(tmp_path / "a.jsonl", lines({"text": "a\u2028", "id": 1}, {"text": ""}, {"text": "b"})))
    assert (corpus.unit, corpus.rows) == ("document", ["a\u2028", "", "b"])
    assert corpus.text() == "a\u2028\n\n\n\nb"
    assert corpus.documents() == corpus.rows


def test_jsonl_messages_rows_are_conversations_without_a_text(tmp_path: Path) -> None:
    corpus = read_source(write(tmp_path / "a.jsonl", lines({"messages": TALK[0]}, {"messages": TALK[1]})))
    assert (corpus.unit, corpus.rows) == ("chat", TALK)
    with pytest.raises(InputError, match="conversations, not text"):
        corpus.text()


def test_the_hash_of_conversations_is_that_of_their_content(tmp_path: Path) -> None:
    first = read_source(write(tmp_path / "a.jsonl", lines({"messages": TALK[0]})))
    again = read_source(write(tmp_path / "b.jsonl", '\n{"n": 1, "messages": ' + json.dumps(TALK[0]) + "}"))
    other = read_source(write(tmp_path / "c.jsonl", lines({"messages": TALK[1]})))
    assert first.sha256 == again.sha256 != other.sha256


@pytest.mark.parametrize(("column", "rows"), [("text", ["a", "b"]), ("messages", TALK)])
def test_the_same_rows_are_the_same_corpus_in_every_container(tmp_path: Path, column: str, rows: list) -> None:
    records = [{column: row, "id": index} for index, row in enumerate(rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    saved = datasets.Dataset.from_list(records)
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "dict"))
    found = [
        read_source(write(tmp_path / "a.jsonl", lines(*records))),
        *(read_source(str(tmp_path / name)) for name in ("a.parquet", "saved", "dict")),
    ]
    assert len({corpus.sha256 for corpus in found}) == 1
    assert all(list(corpus.rows) == rows for corpus in found)
    assert [corpus.name for corpus in found] == ["a.jsonl", "a.parquet", "saved", "dict"]


def test_splits_of_a_dictionary_follow_the_use(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test", "validation")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "all"))
    assert read_source(str(tmp_path / "all"), "calibration").rows == ["train"]
    assert read_source(str(tmp_path / "all"), "test").rows == ["test"]
    datasets.DatasetDict({"a": parts["train"], "b": parts["test"]}).save_to_disk(str(tmp_path / "odd"))
    with pytest.raises(InputError, match="splits a, b"):
        read_source(str(tmp_path / "odd"))


FAULTS = {
    "a.pdf": (b"x", "'.pdf' is not a kind of file"),
    "noext": (b"x", "'' is not a kind of file"),
    "latin.txt": ("é".encode("latin-1"), "byte 0 is not UTF-8"),
    "empty.txt": (b"", "holds no text"),
    "white.raw": (b" \n\n \n", "holds no text"),
    "empty.jsonl": (b"\n\n", "holds no text"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
    "list.jsonl": (b"[1]\n", "line 1 is not an object"),
    "column.jsonl": (b'{"content": "a"}\n', "rows have content"),
    "gap.jsonl": (b'{"text": "a"}\n{"messages": []}\n', "`text` of row 2 is not a string"),
    "number.jsonl": (b'{"text": 3}\n', "`text` of row 1 is not a string"),
    "turns.jsonl": (b'{"messages": ["hi"]}\n', "`messages` of row 1 is not a list of"),
    "silent.jsonl": (b'{"messages": []}\n', "`messages` of row 1 is not a list of"),
    "fake.parquet": (b"PAR1 not really", "not a Parquet file"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_input_errors(tmp_path: Path, name: str) -> None:
    content, cause = FAULTS[name]
    with pytest.raises(InputError, match="--dataset") as error:
        read_source(write(tmp_path / name, content))
    assert cause in str(error.value)


def test_a_parquet_file_without_text_names_its_columns(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="rows have a, b"):
        read_source(str(tmp_path / "a.parquet"))


def test_missing_files_and_hub_names_are_not_fetched() -> None:
    with pytest.raises(InputError, match="no such file or directory"):
        read_source("Salesforce/wikitext")


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(InputError, match="not a directory saved by datasets"):
        read_source(str(tmp_path))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read_source(write(tmp_path / "a.txt", b"\xef\xbb\xbfa")).rows == ["a"]
