"""What a run has finished, so that a killed one can go on: one small JSON file, replaced as a whole after each part.

The journal belongs to one run: inputs, recipe, versions, device, threads. A run that differs in any of them would give
other bytes, so it may not go on from this journal, and is told which one differs. A checksum makes a damaged journal
an error and never a wrong resume.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .durable import write_atomically
from .errors import InputError

JOURNAL = "journal.json"
VERSION = 1
OVER = "leave --resume out to start over"


@dataclass(frozen=True)
class Entry:
    """One finished part: the hex SHA-256 of each of its tensors, and whatever the run wants to remember of it."""

    hashes: dict[str, str]
    payload: dict[str, Any]


class Journal:
    """The journal in `staging`. `identity` is what must be equal for a resume; `completed` maps a part to its entry."""

    def __init__(self, staging: Path, identity: dict[str, Any], completed: dict[int, Entry]) -> None:
        self.file = staging / JOURNAL
        self.identity = identity
        self.completed = completed

    @classmethod
    def open(cls, staging: Path, identity: Mapping[str, Any], resume: bool) -> Journal:
        """The journal to go on with: the one in `staging` if `resume` finds any, else an empty one, written at once.

        `identity` is a JSON object. Raises InputError when the journal is damaged or is that of another run.
        """
        wanted: dict[str, Any] = json.loads(_canonical(identity))
        file = staging / JOURNAL
        if resume and file.exists():
            journal = cls(staging, *_read(file))
            _prove_same(journal.identity, wanted)
            return journal
        journal = cls(staging, wanted, {})
        journal._write()
        return journal

    def record(self, part: int, hashes: Mapping[str, str], payload: Mapping[str, Any]) -> None:
        """Note that `part` is finished. On the disk when this returns; `payload` is a JSON object without NaN."""
        self.completed[part] = Entry(dict(hashes), json.loads(_canonical(payload)))
        self._write()

    def _write(self) -> None:
        parts = {
            str(part): {"hashes": entry.hashes, "payload": entry.payload} for part, entry in self.completed.items()
        }
        body = {"version": VERSION, "identity": self.identity, "parts": parts}
        text = _canonical(body)
        write_atomically(self.file, _canonical({"sha256": _digest(text), "body": body}).encode("utf-8"))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _read(file: Path) -> tuple[dict[str, Any], dict[int, Entry]]:
    """Identity and entries of a journal. Raises InputError when it is not, to the last bit, what was written."""
    try:
        content = json.loads(file.read_bytes())
        body = content["body"]
        whole = content["sha256"] == _digest(_canonical(body))
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(str(file), "the journal is damaged", OVER) from error
    if not whole:
        raise InputError(str(file), "the journal is damaged", OVER)
    if body["version"] != VERSION:
        raise InputError(str(file), f"the journal is of version {body['version']}, this is {VERSION}", OVER)
    entries = {int(part): Entry(entry["hashes"], entry["payload"]) for part, entry in body["parts"].items()}
    return body["identity"], entries


def _prove_same(journalled: dict[str, Any], wanted: dict[str, Any]) -> None:
    before, now = dict(_flat("", journalled)), dict(_flat("", wanted))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            cause = f"{key} was {before.get(key)!r} in the run to resume and is {now.get(key)!r} now"
            raise InputError("--resume", cause, f"give the same again, or {OVER}")


def _flat(path: str, value: object) -> Iterator[tuple[str, object]]:
    """The leaves of nested objects as `outer.inner`, so that a difference can be named."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else key, inner)
    else:
        yield path, value
