"""Whether a source holds the tensors that its config.json speaks of.

Plain rounding never builds the model, so nothing else would notice before an engine loads the output. What is compared
is what the table of architectures knows: sizes and counts, and linears that engines load as one matrix with others.
Where the model is built, `calibration/stream.py` looks for every parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...formats.architectures import Architecture
from ...formats.checkpoint import Checkpoint
from ...formats.errors import InputError

_CORRECT = "correct config.json, or the checkpoint"


def check_whole(checkpoint: Checkpoint, facts: Architecture, linears: Collection[str]) -> None:
    """Raise InputError where tensors are missing or do not fit config.json, as far as a known architecture tells.

    `linears` are the names of those in the checkpoint, the head among them.
    """
    if not facts.known:
        return
    config = _of_text(checkpoint.config)
    _check_blocks(checkpoint, facts, config.get("num_hidden_layers"))
    _check_embedding(checkpoint, facts, config)
    for name in linears:
        for partner in facts.fused_names(name):
            if partner not in linears:
                raise InputError(f"{partner}.weight", f"is missing beside {name}", "complete the checkpoint")
    tied = checkpoint.config.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is False and facts.head not in linears:
        cause = "is missing, and config.json has tie_word_embeddings false"
        raise InputError(f"{facts.head}.weight", cause, _CORRECT)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _check_blocks(checkpoint: Checkpoint, facts: Architecture, wanted: object) -> None:
    count = facts.count_blocks(checkpoint.tensors)
    if isinstance(wanted, int) and wanted != count:
        cause = f"config.json has {wanted} layers and the checkpoint {count}"
        raise InputError(str(checkpoint.directory), cause, "correct num_hidden_layers, or complete the checkpoint")


def _check_embedding(checkpoint: Checkpoint, facts: Architecture, config: Mapping[str, Any]) -> None:
    name = f"{facts.embedding}.weight"
    if name not in checkpoint.tensors:
        raise InputError(name, "is missing", "complete the checkpoint")
    shape = checkpoint.tensors[name].shape
    for key, size in zip(("vocab_size", "hidden_size"), shape, strict=False):
        wanted = config.get(key, size)
        if wanted != size:
            raise InputError(name, f"is {list(shape)}, and config.json has {key} {wanted!r}", _CORRECT)
