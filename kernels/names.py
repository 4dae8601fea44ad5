"""Where a checkpoint tensor belongs in the model, because transformers renames modules between disk and memory.

Mixtral's `block_sparse_moe.experts.3.w1` on disk is `mlp.experts.3.w1` in memory. Engines and `quantization_config`
know disk names only, so everything here goes from disk to memory, by transformers' own table, and never back.
"""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from ..formats.errors import InputError

EXPERT = re.compile(r"\.\d+\.\w+\.weight$")
OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"(^|\.)attn\.masked_bias$")
"""Tables that old checkpoints store and models compute since."""


class Names:
    """The way from checkpoint names to the paths of parameters and buffers of one model.

    Built once a model, before its linears are replaced: the paths of a linear's packed tensors are found through the
    place of its weight.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self._places = set(model.state_dict(keep_vars=True))
        self._prefix = model.base_model_prefix
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in (*ignored, *OLD_BUFFERS)))

    def path(self, name: str) -> str | None:
        """The dotted path of checkpoint tensor `name` in the model, None when the model has no place for it."""
        found = self._place(name)
        if found is not None:
            return found
        stem, _, leaf = name.rpartition(".")
        weight = self._place(f"{stem}.weight")
        return None if weight is None else f"{weight.removesuffix('weight')}{leaf}"

    def ignored(self, name: str) -> bool:
        """Whether transformers leaves checkpoint tensor `name` aside: a table that the model computes itself."""
        return self._ignored.search(name) is not None

    def _place(self, name: str) -> str | None:
        for candidate in (self._renamed(name), name):
            bare = candidate.removeprefix(f"{self._prefix}.")
            for path in (candidate, f"{self._prefix}.{candidate}", bare):
                if path in self._places:
                    return path
        return None

    def _renamed(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        for converter in self._converters:
            fused, pattern = converter.rename_source_key(name)
            expert = EXPERT.search(name)
            if pattern is not None and expert is not None:
                return fused.rpartition(".")[0] + expert[0]
        return name


_NAMES: WeakKeyDictionary[nn.Module, Names] = WeakKeyDictionary()


def names_of(model: PreTrainedModel) -> Names:
    """The `Names` of `model`, built on first use."""
    if model not in _NAMES:
        _NAMES[model] = Names(model)
    return _NAMES[model]


def module_name(model: PreTrainedModel, checkpoint_name: str) -> str:
    """The dotted path in `model` of a checkpoint tensor. Raises InputError when the model has no place for it."""
    path = names_of(model).path(checkpoint_name)
    if path is None:
        fix = "check config.json against the checkpoint"
        raise InputError(checkpoint_name, f"has no place in a {type(model).__name__}", fix)
    return path
