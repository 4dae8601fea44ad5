"""Loads a model directory, packed or plain, into a transformers model that runs and generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..formats.architectures import architecture
from ..formats.checkpoint import Checkpoint, resolve
from ..formats.errors import InputError
from .arranged_linear import Layouts
from .packed_model import load_packed, refuse
from .registry import check_asked
from .skeleton import UNREADABLE, read_config


def load(
    directory: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model in `directory` (or of an id in the local Hub cache), in eval mode on `device`.

    Linears that are stored packed stay packed: on a CPU they decode while they run, on a GPU they are brought into the
    layout of its kernels, those that share an input as one. Everything else, and the arithmetic, is in
    `dtype`: by default float32 on a CPU, whose half-precision products are slow, else what the checkpoint is stored in.
    Nothing is downloaded, and code in the directory runs only where `trust_remote_code` allows it. Raises InputError
    for a directory that is not a readable model, for tensors that are missing, unexpected, of another shape, or hold
    indices that lead out of a weight, and for a GPU or a kernel that is asked for and not there.
    """
    checkpoint = Checkpoint.open(resolve(str(directory)))
    config = read_config(checkpoint.directory, trust_remote_code)
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        cause = f"torch {torch.__version__} sees no CUDA GPU"
        raise InputError(f"device {device}", cause, "run compress doctor to see why, or load on the cpu")
    if dtype is None:
        dtype = torch.float32 if place.type == "cpu" else _stored_dtype(checkpoint, config)
    with _quiet():
        if checkpoint.quantization is None:
            return _load_plain(checkpoint, config, place, dtype, trust_remote_code)
        check_asked(place.type)
        if place.type != "cuda":
            return load_packed(checkpoint, config, place, dtype, trust_remote_code)
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        layouts = Layouts(architecture(checkpoint.config, shapes), dtype)
        model = load_packed(checkpoint, config, place, dtype, trust_remote_code, layouts.read)
    layouts.arrange(model)
    return model


def _load_plain(
    checkpoint: Checkpoint, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except UNREADABLE as error:
        cause = f"transformers cannot load it ({error})"
        raise InputError(str(checkpoint.directory), cause, "use a model that this transformers knows") from error
    model, info = loaded
    refuse(checkpoint, "is missing", info["missing_keys"])
    refuse(checkpoint, "has another shape than config.json says", [name for name, *_ in info["mismatched_keys"]])
    refuse(checkpoint, "has no place in the model", info["unexpected_keys"])
    return model.to(device).eval()


def _stored_dtype(checkpoint: Checkpoint, config: PreTrainedConfig) -> torch.dtype:
    """What config.json names, else the dtype of the first tensor that holds real numbers."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    stored = (info.dtype for info in checkpoint.tensors.values())
    return next((dtype for dtype in stored if dtype.is_floating_point and dtype.itemsize > 1), torch.float32)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bar and advice off the terminal: what matters of it is raised."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
