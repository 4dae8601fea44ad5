"""A model directory, known by its headers: which tensors it has, where they lie, and which files go along unchanged.

Everything that can be wrong with a directory is found here, before any weight is read. Only files that belong to the
directory are opened: an index is data from a stranger and must not be able to name a file elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from .durable import disk_faults
from .errors import InputError
from .headers import AGAIN, TensorInfo, read_header
from .progress import Track, silent
from .replacing import recover
from .side_files import side_files
from .tensor_bytes import chunks, read_tensor, sha256_of_file

__all__ = ["Checkpoint", "TensorInfo", "read_config_json", "resolve"]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What people point at by mistake, with what they should do instead; the first that is there names the error.
NOT_CHECKPOINTS = (
    ("adapter_config.json", "it holds an adapter", "merge it into its base model first"),
    ("*.gguf", "it holds a GGUF file", "use the model's safetensors checkpoint"),
    ("*.bin", "its weights are pickled, which can run code", "write it again with save_pretrained(), as safetensors"),
    ("*.pt", "its weights are pickled, which can run code", "write it again with save_pretrained(), as safetensors"),
    ("*.pth", "its weights are pickled, which can run code", "write it again with save_pretrained(), as safetensors"),
    ("model-*.safetensors", f"its shards have no {INDEX}", "download the index"),
    ("*.safetensors", f"it has neither {SINGLE} nor {INDEX}", "save the model with save_pretrained()"),
)


@dataclass(frozen=True)
class Checkpoint:
    """The proven headers of a model directory.

    `tensors` maps a name to its place, `shards` are the weight files by name, `side_files` those to be copied as they
    are, `warnings` oddities that harm nothing. No file is kept open and no tensor is held.
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    shards: list[Path]
    side_files: list[Path]
    warnings: list[str]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read the headers of `directory`. Raises InputError for anything that is missing or does not add up."""
        if not directory.is_dir():
            raise InputError(str(directory), "is not a directory", "name a model directory with a config.json")
        config = read_config_json(directory)
        warnings: list[str] = []
        shards, index = _shards(directory)
        tensors = _tensors(shards)
        if index is not None:
            _prove_index(directory, index, tensors, warnings)
        if not tensors:
            raise InputError(str(directory), "its weight files hold no tensors", AGAIN)
        sides = [inside(directory, name) for name in side_files(directory)]
        return cls(directory, config, tensors, shards, sides, warnings)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The `quantization_config` of an already quantised model, else None."""
        config = self.config.get("quantization_config") or self.config.get("compression_config")
        return config if isinstance(config, dict) else None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Where tensor `name` lies. Raises InputError when there is none."""
        if name not in self.tensors:
            raise InputError(
                f"{self.directory}: tensor '{name}'", "is not in the checkpoint", "check the model's files"
            )
        return self.tensors[name]

    def read(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """Tensor `name` in its stored dtype and shape, in fresh memory of `device`; the file is closed again."""
        return read_tensor(self.info(name), device)

    def copy_bytes(self, name: str, sink: Callable[[memoryview], object]) -> None:
        """Hand the stored bytes of tensor `name` to `sink`, a few MiB at a time."""
        for chunk in chunks(self.info(name)):
            sink(chunk)

    def sha256(self, track: Track = silent) -> str:
        """Hex SHA-256 over config.json and the shards: of the lines `name NUL hex-digest` in order of name."""
        digest = hashlib.sha256()
        files = [self.directory / CONFIG, *self.shards]
        for file in track(files, "hashing the source", len(files)):
            name = file.relative_to(self.directory).as_posix()
            digest.update(f"{name}\0{sha256_of_file(file)}\n".encode())
        return digest.hexdigest()


def resolve(model: str, key: str = "MODEL") -> Path:
    """The directory that `model` means: a local one, else the snapshot of that id in the local Hub cache.

    Never asks the network. Puts back a directory whose replacement was cut off (`replacing.recover`). Raises
    InputError when `model` is neither; `key` says which one where it has no name.
    """
    if not model:
        raise InputError(key, "is empty", "name a model directory or an id")
    local = Path(model)
    with disk_faults(model, kept=None):
        recover(local.absolute())
    if local.is_dir():
        return local
    if local.exists():
        raise InputError(model, "is a file", "name the model's directory")

    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, CONFIG)
    except HFValidationError as error:
        raise InputError(model, "there is no such directory", "check the path") from error
    if not isinstance(config, str):
        fix = f"check the path, or fetch it with `hf download {model}`"
        raise InputError(model, "is neither a directory nor a model in the local Hub cache", fix)
    return Path(config).parent


def inside(directory: Path, name: str) -> Path:
    """The path of file `name` of `directory`, proven to lie in it or to be a blob of the Hub cache it belongs to.

    Raises InputError for absolute names, names with `..`, and links to anywhere else.
    """
    parts = PurePosixPath(name)
    key = f"{directory}: file '{name}'"
    if not parts.parts or parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name:
        raise InputError(key, "leaves the model directory", "name files inside it")
    root, path = directory.resolve(), directory / name
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(key, "is a link that leads nowhere", AGAIN) from error
    if not any(target.is_relative_to(home) for home in (root, *_blob_stores(root))):
        raise InputError(key, f"is a link out of the model directory, to {target}", "copy the file into the directory")
    return path


def _blob_stores(root: Path) -> list[Path]:
    """Where the snapshot folder `root` may link to: its repository's blobs and the store that repositories share.

    `<cache>/models--<id>/snapshots/<revision>/` links into `<cache>/models--<id>/blobs/`, which may itself link into
    `<cache>/blobs/` (layout of huggingface_hub).
    """
    for parent in root.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return [parent.parent / "blobs", parent.parent.parent / "blobs"]
    return []


def read_config_json(directory: Path) -> dict[str, Any]:
    """The config.json of a model directory. Raises InputError where there is none, or it is not a JSON object."""
    file = inside(directory, CONFIG)
    if not file.is_file():
        for pattern, cause, fix in NOT_CHECKPOINTS[:2]:
            if next(directory.glob(pattern), None):
                raise InputError(str(directory), cause, fix)
        raise InputError(str(directory), f"has no {CONFIG}", "name a Hugging Face model directory")
    config = _read_json(file)
    if not isinstance(config, dict):
        raise InputError(str(file), "is not a JSON object", AGAIN)
    return config


def _read_json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), f"is not valid JSON ({error})", AGAIN) from error
    except OSError as error:
        raise InputError(str(file), f"cannot be read ({error.strerror})", "check its permissions") from error


def _shards(directory: Path) -> tuple[list[Path], dict[str, Any] | None]:
    """The weight files in order of name, and the index that named them (None for a single file)."""
    single, index_file = inside(directory, SINGLE), inside(directory, INDEX)
    index = _read_json(index_file) if index_file.is_file() else None
    if index is None:
        if single.is_file():
            return [single], None
        for pattern, cause, fix in NOT_CHECKPOINTS:
            if next(directory.glob(pattern), None):
                raise InputError(str(directory), cause, fix)
        raise InputError(str(directory), f"has no {SINGLE}", "name a Hugging Face model directory with its weights")
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(index, dict) or not isinstance(places, dict):
        raise InputError(str(index_file), "has no weight_map", AGAIN)
    if not all(isinstance(place, str) for place in places.values()):
        raise InputError(str(index_file), "its weight_map has a value that is not a file name", AGAIN)
    files = sorted(set(places.values()))
    if single.is_file() and files != [SINGLE]:
        cause = f"it has both {SINGLE} and an index of other shards, and readers disagree on which counts"
        raise InputError(str(directory), cause, "remove the stale one")
    shards = [inside(directory, name) for name in files]
    for shard in shards:
        if not shard.is_file():
            raise InputError(str(directory), f"shard {shard.name} of its index is missing", "download it")
    return shards, index


def _tensors(shards: list[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(shard).tensors.items():
            if name in tensors:
                cause = f"is in both {tensors[name].file.name} and {shard.name}"
                raise InputError(
                    f"{shard.parent}: tensor '{name}'", cause, "download the shards again, of one revision"
                )
            tensors[name] = info
    return tensors


def _prove_index(directory: Path, index: dict[str, Any], tensors: dict[str, TensorInfo], warnings: list[str]) -> None:
    """Every tensor of the index must be in the shard it names.

    The other way round, and the total, only warn: checkpoints in the wild count tied weights twice, readers take
    every tensor of a shard and ignore the total, and the headers already prove that nothing is cut off.
    """
    places: dict[str, str] = index["weight_map"]
    for name, place in places.items():
        info = tensors.get(name)
        if info is None or info.file != directory / place:
            where = "missing from every shard" if info is None else f"in {info.file.name}"
            cause = f"the index puts it in {place}, but it is {where}"
            raise InputError(f"{directory}: tensor '{name}'", cause, "download index and shards again, of one revision")
    strays = sorted(tensors.keys() - places.keys())
    if strays:
        warnings.append(f"{INDEX} does not list {len(strays)} tensors of its shards, such as '{strays[0]}'")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    nbytes = sum(info.nbytes for info in tensors.values())
    if total is not None and total != nbytes:
        warnings.append(f"{INDEX} says total_size {total}, but the shards hold {nbytes} bytes")
