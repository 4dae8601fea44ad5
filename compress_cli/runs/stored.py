"""Which linears of a model directory are stored packed, and under which scheme: what `inspect` and `verify` start from.

Headers and `quantization_config` only; any directory in a layout of compressed-tensors will do, ours or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats.architectures import architecture
from ...formats.checkpoint import Checkpoint, TensorInfo
from ...formats.errors import InputError, inside
from ...formats.layout import misfits, numbers_of, numbers_suffix
from ...formats.packings import check_stored, packing, stored_layout
from ...formats.pruned import Packable
from ...formats.quantization_config import parse
from ...formats.scheme import Scheme

_SHAPE = "weight_shape"


@dataclass(frozen=True)
class Packed:
    """One packed linear: its scheme, (out, in), and its tensors by suffix."""

    name: str
    scheme: Scheme
    shape: tuple[int, int]
    tensors: Mapping[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored for this weight, its bias apart."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over number of weights, scales and zero points included."""
        return 8 * self.nbytes / math.prod(self.shape)

    def read(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The tensors themselves, by suffix."""
        return {suffix: checkpoint.read(info.name) for suffix, info in self.tensors.items()}

    @property
    def dtype(self) -> torch.dtype:
        """That of the scales, or of values where there are none."""
        return self.tensors[numbers_suffix(self.tensors) or numbers_of(self.scheme)].dtype

    def check(self) -> None:
        """Raise InputError naming the first tensor that is missing, unexpected, or of another dtype or shape.

        That is `weight_shape` where others do not fit it: each of them would be wrong in the same way.
        """
        with inside(self.name):
            others = misfits(self.tensors, stored_layout(self.tensors, self.scheme, self.shape))
            if _SHAPE in self.tensors and len(others) > 1:
                cause = f"says {list(self.shape)}, which does not fit {' and '.join(others[:2])}"
                raise InputError(_SHAPE, cause, "use a whole copy")
            check_stored(self.tensors, self.scheme, self.shape)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Packable:
        """What `tensors` stand for by the decoder of `formats`. Raises InputError for what does not fit the scheme."""
        return packing(self.scheme).unpack(tensors, self.scheme, self.shape)


def schemes(checkpoint: Checkpoint) -> dict[str, Scheme]:
    """Linear name -> scheme, as config.json says. Raises InputError for a quantisation that is not read here."""
    if checkpoint.quantization is None:
        return {}
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    facts = architecture(checkpoint.config, shapes)
    plain = {name for name, shape in shapes.items() if facts.is_linear(name, shape) or name == f"{facts.head}.weight"}
    linears = {name.removesuffix(".weight") for name in plain} | packed_names(checkpoint)
    return parse(checkpoint.quantization, sorted(linears))


def packed_names(checkpoint: Checkpoint) -> set[str]:
    """Names of the modules whose weight is stored packed, whole or not, as any tensor tells that only such have."""
    found = set()
    for name, info in checkpoint.tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix.startswith("weight_") or (suffix == "weight" and info.dtype.itemsize == 1):
            found.add(module)
    return found


def packed_linear(checkpoint: Checkpoint, name: str, scheme: Scheme) -> Packed:
    """Linear `name` as it is stored. Raises InputError when tensors of it are missing or do not fit the scheme."""
    stored = {
        full.removeprefix(f"{name}."): info
        for full, info in checkpoint.tensors.items()
        if full.rpartition(".")[0] == name and not full.endswith(".bias")
    }
    if numbers_suffix(stored) is None:
        cause = f"is missing, while config.json says {scheme.name}"
        raise InputError(f"{name}.{numbers_of(scheme)}", cause, "use a whole copy")
    return Packed(name, scheme, _shape(checkpoint, name, scheme, stored), stored)


def _shape(checkpoint: Checkpoint, name: str, scheme: Scheme, stored: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """(out, in): as a tensor says, else as many codes as the stored bits hold."""
    if _SHAPE in stored:
        said = checkpoint.read(f"{name}.{_SHAPE}")
        if said.shape != (2,) or said.dtype.is_floating_point or int(said.min()) < 1:
            raise InputError(f"{name}.{_SHAPE}", f"{said.tolist()} is no shape of a weight", "use a whole copy")
        return int(said[0]), int(said[1])
    weight = stored.get("weight") or stored.get("weight_packed")
    if weight is None or len(weight.shape) != 2:
        raise InputError(f"{name}.weight", "is missing or no matrix", "use a whole copy")
    codes_per_element = 8 * weight.dtype.itemsize // scheme.grid.bits
    return weight.shape[0], weight.shape[1] * codes_per_element


def rows_at_a_time(columns: int, elements: int = 1 << 22) -> int:
    """How many rows of `columns` to work on together, so that temporaries stay near `elements` numbers."""
    return max(1, elements // max(1, columns))


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or Inf; true for integers."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 else tensor).all())
