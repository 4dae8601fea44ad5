"""Where the embedded default model and text lie inside the package.

They are part of the wheel, so that the first command a user types needs no download; everything that wants them asks
here and knows nothing of the folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from ..formats.checkpoint import resolve
from ..formats.errors import InputError

EMBEDDED = "embedded"
"""What a user writes for what is embedded, model or text."""
Split = Literal["calibration", "test"]

MODEL_NAME = "bookllama-7m"
_ASSETS = Path(__file__).resolve().parent / "assets"
_TEXTS: dict[Split, str] = {"calibration": "wiki-calib.txt", "test": "wiki-test.txt"}


def model_path() -> Path:
    """The directory of the embedded model. Raises InputError when the installation lacks it."""
    return _present(_ASSETS / MODEL_NAME)


def model_directory(model: str | Path | None, key: str = "MODEL") -> Path:
    """The directory of the model that a user named: the embedded one for `EMBEDDED` and None, else see `resolve`."""
    return model_path() if model is None or str(model) == EMBEDDED else resolve(str(model), key)


def shown_name(model: str | Path | None) -> str:
    """How that model is called in results: without the folders of this machine."""
    if model is None or str(model) == EMBEDDED:
        return MODEL_NAME
    return Path(model).resolve().name if os.path.isdir(model) else str(model)


def text_path(split: Split) -> Path:
    """The file of one split of the embedded text (UTF-8). Raises InputError when the installation lacks it."""
    return _present(_ASSETS / "text" / _TEXTS[split])


def _present(path: Path) -> Path:
    if not path.exists():
        raise InputError(
            EMBEDDED, f"this installation lacks {path.name}", "reinstall compress, or name a model and a --dataset"
        )
    return path
