"""Which files of a model directory go into the output as they are: all but weights, their index and what is rewritten.

A list of what to leave out, not of what to take: new tokenizer and template files appear with every generation of
models, and one left behind breaks the output quietly, while one too many costs nothing.
"""

from __future__ import annotations

from pathlib import Path

from .errors import InputError

# Weights and other heavy or executable forms of them.
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".h5", ".msgpack", ".ot"),
    *(".gguf", ".ggml", ".onnx", ".onnx_data", ".tflite", ".mlmodel", ".nemo", ".engine", ".tar", ".gz", ".zip"),
)
# Written anew for the output, or about the source only.
REWRITTEN = frozenset({"config.json", "readme.md", "compress_report.json", "run.json", "compress_layers.csv"})
FOLDERS = ("additional_chat_templates",)


def side_files(directory: Path) -> list[str]:
    """Names, relative to `directory` and sorted, of the files to copy verbatim. Raises InputError for a dead link."""
    found = list(directory.iterdir())
    for folder in FOLDERS:
        if (directory / folder).is_dir():
            found += (directory / folder).iterdir()
    names = [entry.relative_to(directory).as_posix() for entry in found if _is_side_file(entry)]
    return sorted(names)


def _is_side_file(path: Path) -> bool:
    name = path.name.lower()
    if name.startswith(".") or name in REWRITTEN or name.endswith(".index.json") or path.suffix.lower() in WEIGHTS:
        return False
    if path.is_symlink() and not path.exists():
        raise InputError(str(path), "is a link that leads nowhere", "download the file again")
    return path.is_file()
