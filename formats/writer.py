"""The output directory while it is being made: parts that survive a kill, then shards, then one rename.

    .OUT.partial/            staging, beside OUT so that the last step is a rename
        lock                 held while a run is alive: two runs into one OUT refuse
        journal.json         what is finished (formats/journal.py)
        parts/00007.safetensors
        result/              shards, config, side files: becomes OUT

At any instruction a kill leaves no trace, a staging directory that `--resume` goes on with, or the complete OUT. Parts
are kept until OUT stands, so the disk must hold the output twice.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from torch import Tensor

from .container import split, write_container
from .durable import TEMPORARY, Busy, Lock, disk_faults, publish, remove, sync_tree
from .errors import InputError
from .headers import TensorInfo, read_header
from .replacing import LOCK, MARKER, RESULT, clear, old_path, recover, replace, settle, staging_path
from .tensor_bytes import sha256_of, sha256_of_file

__all__ = ["OutputDirectory", "recover"]

PARTS = "parts"
MAX_SHARD_BYTES = 2 << 30


class OutputDirectory:
    """`out` in the making. Use as a context: what is not committed or discarded stays in `staging` for a resume.

    `out` must not exist, unless `overwrite` allows to replace a model directory. With `resume` the parts of a killed
    run are kept, else they are deleted. `source` is the model being read, which `out` may not touch. Raises InputError
    before anything is written.
    """

    def __init__(self, out: Path, overwrite: bool, resume: bool, source: Path | None = None) -> None:
        out = Path(os.path.abspath(out))
        self.out = out.parent.resolve() / out.name
        self.staging = staging_path(self.out)
        with disk_faults(str(out), kept=None):
            recover(self.out)
            check_out(self.out, overwrite, source)
            self._made = [folder for folder in self.out.parents if not folder.exists()]
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.staging, self.out)
            try:
                check_out(self.out, overwrite, source)  # another run may have come first
                self._tidy(resume)
            except BaseException:
                self._lock.release()
                raise

    def _tidy(self, resume: bool) -> None:
        """Leave in staging only the lock and, for a resume, finished parts and their journal."""
        for entry in self.staging.iterdir():
            again = entry.name == RESULT or entry.suffix == TEMPORARY
            if entry.name != LOCK and (again or not resume):
                remove(entry)
        parts = self.staging / PARTS
        parts.mkdir(exist_ok=True)
        for entry in parts.glob(f"*{TEMPORARY}"):
            remove(entry)
        (self.staging / RESULT).mkdir()

    def __enter__(self) -> OutputDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def write_part(self, index: int, tensors: Mapping[str, Tensor | TensorInfo]) -> dict[str, str]:
        """Write part `index`, replacing an earlier one; on the disk when this returns the SHA-256 of each tensor.

        A TensorInfo is copied from its file byte for byte, a few MiB at a time. Raises StoppedEarly on a full disk.
        """
        file = self._part(index)
        temporary = file.with_name(file.name + TEMPORARY)
        with disk_faults(str(self.out), kept=self.staging):
            try:
                hashes = write_container(temporary, tensors)
                publish(temporary, file)
            finally:
                remove(temporary)  # a full disk gets its room back
        return hashes

    def read_part(self, index: int) -> dict[str, TensorInfo]:
        """Where the tensors of finished part `index` lie. Raises InputError when it is damaged or not there."""
        return read_header(self._part(index)).tensors

    def has_part(self, index: int, hashes: Mapping[str, str]) -> bool:
        """Whether part `index` holds exactly the tensors of `hashes`, read again and hashed."""
        if not self._part(index).exists():
            return False
        try:
            tensors = self.read_part(index)
            return tensors.keys() == hashes.keys() and all(
                sha256_of(info) == hashes[name] for name, info in tensors.items()
            )
        except InputError:  # a damaged part is one to write again
            return False

    def assemble(self, order: Sequence[int], max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, str]:
        """Join the parts, in `order`, into model.safetensors, or shards and their index; the SHA-256 of each tensor.

        Raises ValueError when two parts hold a tensor of the same name, StoppedEarly on a full disk.
        """
        tensors: dict[str, TensorInfo] = {}
        for index in order:
            part = self.read_part(index)
            if twice := tensors.keys() & part.keys():
                raise ValueError(f"part {index} holds tensors of an earlier part: {sorted(twice)}")
            tensors.update(part)
        shards = split(tensors, max_shard_bytes)
        hashes: dict[str, str] = {}
        places: dict[str, str] = {}
        with disk_faults(str(self.out), kept=self.staging):
            for number, names in enumerate(shards, start=1):
                file = shard_name(number, len(shards))
                hashes |= write_container(self.staging / RESULT / file, {name: tensors[name] for name in names})
                places |= dict.fromkeys(names, file)
            if len(shards) > 1:
                self.add_file("model.safetensors.index.json", encode_index(tensors, places))
        return hashes

    def add_file(self, name: str, content: bytes | Path) -> None:
        """Add file `name` (folders allowed) to the output: these bytes, or a copy of that file."""
        target = self.staging / RESULT / name
        with disk_faults(str(self.out), kept=self.staging):
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_bytes(content)

    def file_hashes(self) -> dict[str, str]:
        """Hex SHA-256 of every file of the output so far, shards included, by name in order."""
        result = self.staging / RESULT
        files = sorted(path for path in result.rglob("*") if path.is_file())
        return {file.relative_to(result).as_posix(): sha256_of_file(file) for file in files}

    def commit(self) -> None:
        """Make `out` appear, complete and on the disk, and remove staging; a replaced directory is gone only then."""
        with disk_faults(str(self.out), kept=self.staging):
            sync_tree(self.staging / RESULT)
            replace(self.out)
        self._lock.release()

    def discard(self) -> None:
        """Remove staging, everything in it, and the folders made for it: nothing was written."""
        clear(self.staging)
        self._lock.release()
        _remove_empty(self._made)

    def _part(self, index: int) -> Path:
        return self.staging / PARTS / f"{index:05d}.safetensors"


def shard_name(number: int, count: int) -> str:
    """File name of shard `number` (from 1) of `count`, as transformers names them."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def encode_index(tensors: Mapping[str, TensorInfo], places: Mapping[str, str]) -> bytes:
    """The index of sharded `tensors`; `places` maps a tensor to its shard's file name."""
    total = sum(info.nbytes for info in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: places[name] for name in sorted(places)}}
    return (json.dumps(index, indent=2) + "\n").encode("utf-8")


def check_out(out: Path, overwrite: bool, source: Path | None = None) -> None:
    """Raise InputError when `out` may not be written; `overwrite` allows to replace a model directory."""
    key = f"-o {out}"
    if source is not None:
        home = source.resolve()
        if out.is_relative_to(home) or home.is_relative_to(out):
            raise InputError(
                key, f"it and the source {source} lie in one another", "name a directory beside the source"
            )
    above = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        raise InputError(key, f"{above} is not a directory", "name another place")
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise InputError(key, "it is not a directory", "name a new directory")
    if not overwrite:
        raise InputError(key, "it exists", "name a new directory, or replace it with --overwrite")
    if not (out / "config.json").exists() and any(out.iterdir()):
        raise InputError(key, "it holds something that is no model", "name a new directory, or empty this one")
    if os.path.lexists(old_path(out)):
        raise InputError(key, f"{old_path(out)} is in the way of setting it aside", "move that away")


def unfinished_parts(out: Path) -> int:
    """How many finished parts a stopped run has left for a resume: a run without it drops them."""
    return sum(1 for _ in (staging_path(out) / PARTS).glob("*.safetensors"))


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove `folders`, innermost first, up to one that is not empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:  # somebody else has put something there
            return


def _locked(staging: Path, out: Path) -> Lock:
    while True:
        staging.mkdir(exist_ok=True)
        try:
            lock = Lock(staging / LOCK)
        except FileNotFoundError:
            continue  # the last run removed staging just now
        except Busy as error:
            cause = "another run is writing it"
            raise InputError(f"-o {out}", cause, "wait for that run, or name another directory") from error
        if not (staging / MARKER).exists():
            return lock
        settle(out)  # may remove staging, and the lock with it
        lock.release()
