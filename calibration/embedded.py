"""Where the embedded default model and text lie inside the package.

They are part of the wheel, so that the first command a user types needs no download; everything that wants them asks
here and knows nothing of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..formats.errors import InputError

Split = Literal["calibration", "test"]

MODEL_NAME = "bookllama-7m"
_ASSETS = Path(__file__).resolve().parent / "assets"
_TEXTS: dict[Split, str] = {"calibration": "wiki-calib.txt", "test": "wiki-test.txt"}


def model_path() -> Path:
    """The directory of the embedded model. Raises InputError when the installation lacks it."""
    return _present(_ASSETS / MODEL_NAME)


def text_path(split: Split) -> Path:
    """The file of one split of the embedded text (UTF-8). Raises InputError when the installation lacks it."""
    return _present(_ASSETS / "text" / _TEXTS[split])


def _present(path: Path) -> Path:
    if not path.exists():
        raise InputError(
            "embedded", f"this installation lacks {path.name}", "reinstall compress, or name a model and a --dataset"
        )
    return path
