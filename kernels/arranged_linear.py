"""Packed linears on a GPU: the weight in the layout of its kernels, and linears that share an input as one product.

`Layouts` turns the packed linears of a model into these, one after another and while others are still to be read, so
that the layout of the checkpoint and that of the device are never both there for more than what runs as one. Where
engines fuse (q, k and v; gate and up) and the schemes agree, the first of the linears to be called runs all of them,
and the others hand out their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..formats.architectures import Architecture
from ..formats.scheme import Scheme
from .activations import stored_input_scale
from .hadamard import rotated
from .lowbit import layout
from .lowbit.layout import Arranged
from .lowbit.packed import Stored, arranged, microscaled, misfit, pick_for
from .packed_linear import PackedLinear
from .registry import reference_alone
from .sparse_linear import fits, merge_sparse

PARTS = ("codes", "scales", "zeros", "factors")
"""Of a weight in fragment order, in the order of `Arranged.tensors`."""


class ArrangedLinear(PackedLinear):
    """A packed linear whose weight is in fragment order (`lowbit/layout.py`).

    Its tensors are buffers that no state dict holds: a checkpoint is written from the layout on disk.
    """

    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    factors: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self, scheme: Scheme, weight: Arranged, bias: Tensor | None, input_scale: Tensor | None = None
    ) -> None:
        super().__init__(scheme, (weight.out_features, weight.in_features), {}, bias)
        self._kind = weight.with_tensors((weight.codes.new_empty(0), None, None, None))
        for name, tensor in zip(PARTS, weight.tensors, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("input_scale", input_scale, persistent=False)

    @property
    def arranged(self) -> Arranged:
        """The weight."""
        return self._kind.with_tensors(self._buffers[name] for name in PARTS)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Nothing is left in the layout of the checkpoint; what is kept has no dtype to convert."""
        return {name: buffer for name, buffer in self._buffers.items() if buffer is not None}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of `x`."""
        from .lowbit.ops import apply

        return apply(rotated(x, self.scheme), self.arranged, self.bias, self.scheme.activation, self.input_scale)

    def weight_rows(self, start: int = 0, stop: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows `start` to `stop` of the weight, decoded to `dtype`: [rows, in_features]."""
        return layout.dequantize_rows(self.arranged, start, self.out_features if stop is None else stop, dtype)


class Shared(nn.Module):
    """Linears with one input as one product: `linear` has the rows of all, `ends` where each one's rows end."""

    def __init__(self, linear: PackedLinear, sizes: Sequence[int]) -> None:
        super().__init__()
        self.linear = linear
        self.ends = tuple(accumulate(sizes))
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._taken: tuple[int, ...] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        """Rows of the linear number `index` for `x`; the product runs once for the parts of one input."""
        if self._input is x and self._output is not None and index not in self._taken:
            output = self._output
        else:  # another input, or the same tensor again, perhaps with other numbers in it
            output = self.linear(x)
            self._input, self._output, self._taken = x, output, ()
        self._taken = (*self._taken, index)
        if len(self._taken) == len(self.ends):  # nothing is kept alive between two inputs
            self._input = self._output = None
        return output[..., self.ends[index - 1] if index else 0 : self.ends[index]]


class SharedPart(nn.Module):
    """One of the linears of a `Shared`, in its place in the model."""

    def __init__(self, shared: Shared, index: int, scheme: Scheme) -> None:
        super().__init__()
        self.shared, self.index, self.scheme = shared, index, scheme
        self.in_features = shared.linear.in_features
        self.out_features = shared.ends[index] - (shared.ends[index - 1] if index else 0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of `x`."""
        return self.shared.part(self.index, x)


@dataclass(frozen=True)
class Layouts:
    """Brings packed linears on a GPU into the layout of their kernels, for activations of `dtype`.

    `facts` say which linears are fused. Linears that no layout fits stay as they are, on the reference.
    """

    facts: Architecture
    dtype: torch.dtype

    def arrange(self, model: nn.Module) -> None:
        """Do so for all packed linears of `model` that are as they were read."""
        for name in [name for name, module in model.named_modules() if type(module) is PackedLinear]:
            linear = _packed_at(model, name)
            if linear is not None:  # and not in the product of others by now
                self._replace(model, self._together(model, name, linear) or (name,))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def read(self, model: nn.Module, name: str) -> None:
        """The same for linear `name`, which was just read, once all that it is fused with are: then what they were
        stored as makes room for the next ones. Biases are read later, and `arrange` is for linears that have them."""
        linear = _packed_at(model, name)
        if linear is not None and linear.bias is None and (names := self._together(model, name, linear)):
            self._replace(model, names)

    def _together(self, model: nn.Module, name: str, linear: PackedLinear) -> tuple[str, ...]:
        """Names of the linears that engines run as one with `linear`, called `name`, which is one of them; none where
        some cannot be rows of one weight, or are not there."""
        place = self.facts.split(name)
        inner = (name,) if place is None else self.facts.fused_with(place[1])
        stem = "" if place is None else name.removesuffix(place[1])
        names = tuple(stem + one for one in inner)
        return names if all(_agree(linear, _packed_at(model, other)) for other in names) else ()

    def _replace(self, model: nn.Module, names: Sequence[str]) -> None:
        """Put what runs the linears called `names` as one in their places."""
        packed = [linear for name in names if isinstance(linear := model.get_submodule(name), PackedLinear)]
        merge = _merge_for(packed, self.dtype)
        if merge is None:
            return
        merged = merge(packed, self.dtype)
        if len(names) == 1:
            model.set_submodule(names[0], merged)
            return
        shared = Shared(merged, [linear.out_features for linear in packed])
        for index, (name, linear) in enumerate(zip(names, packed, strict=True)):
            model.set_submodule(name, SharedPart(shared, index, linear.scheme))


def _packed_at(model: nn.Module, name: str) -> PackedLinear | None:
    """The linear as it was read; None where there is another module or none."""
    try:
        found = model.get_submodule(name)
    except AttributeError:
        return None
    return found if type(found) is PackedLinear else None


def _merge_for(
    linears: Sequence[PackedLinear], dtype: torch.dtype
) -> Callable[[Sequence[PackedLinear], torch.dtype], PackedLinear] | None:
    """What brings linears of one scheme into the layout of a kernel as one; None where they stay as they are."""
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    if fits(linears[0].scheme):
        return merge_sparse
    return _merge if all(_fits(linear, dtype) for linear in linears) else None


def _fits(linear: PackedLinear, dtype: torch.dtype) -> bool:
    """Whether a linear is to have the layout of kernels, and not to stay as the hardware takes it.

    Raises InputError for one that has none, where kernels were asked for.
    """
    if (reason := misfit(linear.scheme)) is not None:
        reference_alone(reason)
        return False
    device = linear.tensors["weight_scale"].device
    shape = (linear.out_features, linear.in_features)
    return not microscaled(linear.scheme) or pick_for(linear.scheme, shape, 1, dtype, device).name != "scaled"


def _agree(one: PackedLinear, other: PackedLinear | None) -> bool:
    """Whether two linears can be rows of one weight."""
    return (
        other is not None
        and one.scheme == other.scheme
        and one.in_features == other.in_features
        and one.out_features % one.scheme.block_rows == other.out_features % one.scheme.block_rows == 0
        and (one.bias is None) == (other.bias is None)
        and one.scheme.activation == other.scheme.activation
        and stored_input_scale(one.tensors) is None
        and stored_input_scale(other.tensors) is None
    )


def _merge(linears: Sequence[PackedLinear], dtype: torch.dtype) -> ArrangedLinear:
    """The linears as one, in fragment order; they lose their tensors."""
    scheme = linears[0].scheme
    stored = [Stored(linear.tensors, (linear.out_features, linear.in_features)) for linear in linears]
    weight = arranged(scheme, stored, dtype)
    bias = (
        torch.cat([linear.bias for linear in linears if linear.bias is not None])
        if linears[0].bias is not None
        else None
    )
    input_scale = stored_input_scale(linears[0].tensors)
    for linear in linears:
        for name in list(linear.tensors):
            delattr(linear, name)
    return ArrangedLinear(scheme, weight, bias, input_scale)
