"""The table of sparsifiers by name. A new one is one file, and one row here."""

from __future__ import annotations

from .magnitude import MAGNITUDE
from .method import Sparsifier
from .sparsegpt import SPARSEGPT
from .wanda import WANDA

SPARSIFIERS: dict[str, Sparsifier] = {row.name: row for row in (MAGNITUDE, WANDA, SPARSEGPT)}
