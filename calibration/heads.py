"""A language model's head, taken apart so that logits can be made a slice of the vocabulary at a time.

What lies between the last hidden state and the logits differs by architecture: a scale here, a soft cap there. Instead
of a list of architectures, the known settings are read off the config, every way to apply them is tried on a short
prompt, and the one that gives the model's own logits is used; when none does, that is an error and not a guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..formats.errors import InputError
from ..kernels.activations import quantize_activation, stored_input_scale
from ..kernels.hadamard import rotated
from ..kernels.packed_linear import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
CAPS = ("final_logit_softcapping", "output_logit_soft_cap")
PROBE_TOKENS = 16
# How far logits made in slices may lie from the model's own, relative to the largest: the rounding of its dtype, wide.
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Head:
    """hidden state → logits: a linear, then `scale`, then a soft cap (`cap * tanh(logits / cap)`)."""

    linear: nn.Module
    vocabulary: int
    dtype: torch.dtype
    scale: float = 1.0
    cap: float | None = None

    def inputs(self, hidden: Tensor) -> Tensor:
        """Hidden states [tokens, hidden] as the head's matrix product takes them, in `dtype`."""
        linear = self.linear
        if isinstance(linear, PackedLinear):
            hidden = rotated(hidden, linear.scheme)
            if linear.scheme.activation is not None:
                hidden = quantize_activation(hidden, linear.scheme.activation, stored_input_scale(linear.tensors))
        return hidden.to(self.dtype)

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Weight [stop - start, hidden] and bias of some tokens of the vocabulary, in `dtype`."""
        linear = self.linear
        packed = isinstance(linear, PackedLinear)
        weight = linear.weight_rows(start, stop) if packed else cast(Tensor, linear.weight)[start:stop]
        bias = getattr(linear, "bias", None)
        return weight.to(self.dtype), None if bias is None else bias[start:stop].to(self.dtype)

    def logits(self, inputs: Tensor, rows: tuple[Tensor, Tensor | None]) -> Tensor:
        """Logits [tokens, rows] in `dtype`, a fresh tensor."""
        weight, bias = rows
        logits = nn.functional.linear(inputs, weight, bias)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


@torch.inference_mode()
def head_of(model: PreTrainedModel, prompt: Tensor) -> Head:
    """The head of `model`, checked against the model's own logits on the first tokens of `prompt` (int64 [tokens]).

    Raises InputError, naming the architecture, when no known form of a head gives those logits.
    """
    linear = model.get_output_embeddings()
    name = type(model).__name__
    if linear is None:
        raise InputError(name, "it has no language-model head", "evaluate a causal language model")
    ids = prompt[:PROBE_TOKENS].to(model.device).unsqueeze(0)
    wanted = model(input_ids=ids, use_cache=False).logits[0]
    states = hidden_states(model, ids)
    dtype = torch.float64 if states.dtype == torch.float64 else torch.float32
    bound = _AGREEMENT.get(states.dtype, 5e-2) * max(1.0, float(wanted.abs().max()))
    for scale, cap in _candidates(model):
        head = Head(linear, wanted.shape[-1], dtype, scale, cap)
        found = head.logits(head.inputs(states), head.rows(0, head.vocabulary))
        if found.shape == wanted.shape and not bool(((found - wanted).abs() > bound).any()):
            return head
    raise InputError(
        name,
        "its logits are not a linear of its last hidden state with a known scale or soft cap",
        "report the architecture; no perplexity is made up for it",
    )


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Last hidden states [tokens, hidden] for `ids` [1, tokens], as the head gets them."""
    states = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
    if states is None:
        raise InputError(type(model).__name__, "it gives no hidden states", "evaluate a causal language model")
    return states[0]


def _candidates(model: PreTrainedModel) -> Iterator[tuple[float, float | None]]:
    """Scales and caps that the config speaks of, none at the end. Granite divides by what others multiply with."""
    config = model.config.get_text_config()
    scales = [float(value) for key in SCALES if (value := getattr(config, key, None))]
    caps = [float(value) for key in CAPS if (value := getattr(config, key, None))]
    for scale in [*scales, *(1 / scale for scale in scales), 1.0]:
        for cap in [*caps, None]:
            yield scale, cap
