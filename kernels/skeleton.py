"""A transformers model without its weights: every parameter on the meta device, everything that is computed is real.

It gives shapes, rotary tables and masks to whoever brings the weights one block at a time. Building it takes no memory
and no initialisation, whatever the size of the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..formats.checkpoint import read_config_json
from ..formats.errors import InputError
from .experts import separate_experts
from .names import module_name

__all__ = ["empty_model", "module_name", "read_config"]

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError)
"""What transformers raises for a config it cannot make sense of."""

_OWN_CODE = "auto_map"  # where a config names Python code that comes with the model
_BUILDING = Lock()
"""transformers switches initialisation off for the whole process: one model is built at a time."""


class _EmptyOnMeta(TorchFunctionMode):
    """Puts what `torch.empty` makes, as modules do for their weights, on the meta device; of this thread only."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


def read_config(directory: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model directory, without its `quantization_config`: what the model would be unpacked.

    Never asks the network. Raises InputError for a config that is missing or no JSON object, that transformers cannot
    read, or that needs code from the directory while `trust_remote_code` is off.
    """
    stored = read_config_json(directory)  # a damaged file is told from a model that transformers does not know
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except UNREADABLE as error:
        raise not_understood(directory, error, _OWN_CODE in stored) from error
    for holder in (config, config.get_text_config()):
        if hasattr(holder, "quantization_config"):
            delattr(holder, "quantization_config")
    return config


def empty_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model that `config` describes, in eval mode, with all parameters on the meta device.

    Buffers hold what `from_pretrained` would give them. Parameters have the dtype they would have there under `dtype`,
    and are tied as there. Without an `attn_implementation` it is SDPA where the architecture can, else eager, as there.
    Fused experts become one linear a projection (`experts.py`). Raises InputError when transformers has no such model.
    """
    try:
        with _BUILDING, no_init_weights(), _EmptyOnMeta():
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
            separate_experts(model)
    except UNREADABLE as error:
        cause = f"transformers cannot build the model ({_first_line(error)})"
        key = str(config.name_or_path or "config.json")
        raise InputError(key, cause, _fix(hasattr(config, _OWN_CODE))) from error
    _drop_parameters(model, dtype)
    _fill_buffers(model, model)
    model.tie_weights()
    return model.eval()


def not_understood(directory: Path, error: Exception, brings_code: bool = False) -> InputError:
    """What to raise for the config.json of a model directory that transformers refused with `error`."""
    cause = f"its config.json is not understood ({_first_line(error)})"
    return InputError(str(directory), cause, _fix(brings_code))


def _fix(brings_code: bool) -> str:
    known = "use a model that this transformers knows, or "
    return known + ("--trust-remote-code if you trust the code in it" if brings_code else "correct its config.json")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    count = 2 if lines and lines[0].endswith(":") else 1  # one that announces the next
    return " ".join(line.strip() for line in lines[:count]).rstrip(".") or type(error).__name__


def _drop_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Move the parameters that were made with values to meta, and give those that stay float32 their dtype."""
    kept = _kept_in_float32(model, dtype)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, old in module._parameters.items():
            if old is not None:
                wide = kept is not None and kept.search(f"{prefix}.{name}") and old.is_floating_point()
                shape = old.to("meta", torch.float32 if wide else old.dtype)
                module._parameters[name] = moved.setdefault(old, nn.Parameter(shape, requires_grad=False))


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """What the architecture does not let be rounded: one list for any half type, one for float16 only."""
    patterns = set(model._keep_in_fp32_modules_strict or ()) if dtype.itemsize == 2 else set()
    if dtype == torch.float16:
        patterns.update(model._keep_in_fp32_modules or ())
    return re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns))) if patterns else None


def _fill_buffers(module: nn.Module, owner: PreTrainedModel) -> None:
    """Give buffers that no checkpoint stores the values that `from_pretrained` gives them, through the same hook."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    computed = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
    if computed:
        for name in computed:
            buffer = module.get_buffer(name)
            module._buffers[name] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer
        with torch.no_grad():
            owner._init_weights(module)
    for child in module.children():
        _fill_buffers(child, owner)
