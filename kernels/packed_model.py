"""Fills the skeleton of a model straight from a packed checkpoint, tensor by tensor, never through a dense copy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..formats.checkpoint import Checkpoint, TensorInfo
from ..formats.errors import InputError, inside
from ..formats.packings import check_stored, packing
from ..formats.quantization_config import parse
from ..formats.scheme import Scheme
from .names import Names, names_of
from .packed_linear import PackedLinear
from .skeleton import empty_model


def load_packed(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
    ready: Callable[[PreTrainedModel, str], object] | None = None,
) -> PreTrainedModel:
    """The model of a checkpoint with a `quantization_config`, its packed linears as `PackedLinear`.

    `ready` is called with the model and the path of each of these once it is read, but for its bias, and may put
    another module in its place; all else is read afterwards, when what that took is free again. Tensors that are not
    packed are cast to `dtype`. Raises InputError for a quantisation that is not read, and for tensors that are missing,
    unexpected, or of another dtype, shape or content.
    """
    model = empty_model(config, dtype, trust_remote_code=trust_remote_code)
    names = names_of(model)
    missing = set(model.state_dict(keep_vars=True))
    rest = dict.fromkeys(checkpoint.tensors)
    linears = _linears(checkpoint, model, names)
    for name, scheme in parse(checkpoint.quantization or {}, linears).items():
        linear = linears[name]
        packed = _pack(linear, name, scheme, checkpoint, device)
        model.set_submodule(linear.path, packed)
        missing.discard(f"{linear.path}.weight")
        _untie(model, f"{linear.path}.weight")
        for suffix in packed.tensors:
            del rest[f"{name}.{suffix}"]
        if ready is not None:
            ready(model, linear.path)
    unexpected = []
    for name in rest:
        path = names.path(name)
        if path in missing:
            _fill(model, path, checkpoint, name, device)
            missing.discard(path)
        elif not names.ignored(name):
            unexpected.append(name)
    refuse(checkpoint, "has no place in the model", unexpected)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    refuse(checkpoint, "is missing", missing)
    _read_generation_config(model, checkpoint)
    nn.Module.to(model, device)
    return model


def refuse(checkpoint: Checkpoint, fault: str, names: Collection[str]) -> None:
    """Raise InputError when `names`, the tensors with this fault, are any."""
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        fix = "download or pack the model again, or correct its config.json"
        raise InputError(f"{checkpoint.directory}: tensor '{min(names)}'{more}", fault, fix)


@dataclass(frozen=True)
class _Linear:
    """A linear that has tensors in the checkpoint: its path in the model, the module, what is stored by suffix."""

    path: str
    module: nn.Linear
    stored: dict[str, TensorInfo]


def _linears(checkpoint: Checkpoint, model: PreTrainedModel, names: Names) -> dict[str, _Linear]:
    """The linears of the model by their names in the checkpoint."""
    stored: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        stem, _, suffix = name.rpartition(".")
        stored.setdefault(stem, {})[suffix] = info
    found = {}
    for stem, tensors in stored.items():
        path = names.path(f"{stem}.weight")
        module = None if path is None else model.get_submodule(path.rpartition(".")[0])
        if path is not None and isinstance(module, nn.Linear):
            found[stem] = _Linear(path.rpartition(".")[0], module, tensors)
    return found


def _pack(linear: _Linear, name: str, scheme: Scheme, checkpoint: Checkpoint, device: torch.device) -> PackedLinear:
    """The packed stand-in for `linear`: the layout is checked before anything is read, contents once when they are."""
    shape = (linear.module.out_features, linear.module.in_features)
    stored = {suffix: info for suffix, info in linear.stored.items() if suffix != "bias"}
    with inside(name):
        check_stored(stored, scheme, shape)
    tensors = {suffix: checkpoint.read(f"{name}.{suffix}", device) for suffix in stored}
    with inside(name):
        packing(scheme).check_contents(tensors, scheme, shape)
    return PackedLinear(scheme, shape, tensors, linear.module.bias)


def _untie(model: PreTrainedModel, path: str) -> None:
    """Let the parameter at `path`, which is packed now, be tied to no other any more."""
    if model.all_tied_weights_keys.pop(path, None) is not None:
        for holder in (model.config, model.config.get_text_config()):
            holder.tie_word_embeddings = False


def _fill(model: PreTrainedModel, path: str, checkpoint: Checkpoint, name: str, device: torch.device) -> None:
    """Put checkpoint tensor `name` in the place of the parameter or persistent buffer at `path`."""
    parent, _, leaf = path.rpartition(".")
    owner = model.get_submodule(parent)
    old = getattr(owner, leaf)
    info = checkpoint.info(name)
    if info.shape != tuple(old.shape):
        cause = f"is {list(info.shape)} where config.json makes it {list(old.shape)}"
        raise InputError(name, cause, "check config.json against the checkpoint")
    tensor = checkpoint.read(name, device).to(old.dtype)
    if isinstance(old, nn.Parameter):
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(owner, leaf, tensor)


def _read_generation_config(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Take the directory's generation_config.json, where it has one; else what config.json implies stays."""
    if (checkpoint.directory / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.directory, local_files_only=True)
        except (OSError, ValueError) as error:
            fix = "correct the file, or remove it"
            raise InputError(f"{checkpoint.directory}/generation_config.json", f"is not read ({error})", fix) from error
