"""Decoding one sequence token by token, end to end: a packed model against its original, both given the same help.

A step is one token through the whole model with a static cache. On a GPU both models are compiled and the step runs
from a CUDA graph, so that what is compared is the work of the device; on a CPU both run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import torch
from transformers import PreTrainedModel, StaticCache

from ...calibration.embedded import model_directory
from ...formats.checkpoint import Checkpoint
from ...kernels.load import load
from .timing import Call, Timing, interleaved

PROMPT_TOKENS, CACHE_TOKENS = 16, 256
WARM_UP = 3
STEPS = 8  # between two looks at the clock; all of them fit into the cache


@dataclass(frozen=True)
class Speed:
    """Decoding of one model: milliseconds a token, tokens a second; bytes of its tensors on disk and, on a GPU, what
    loading it took at most (None elsewhere)."""

    model: str
    ms_per_token: float
    tokens_per_second: float
    stored_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Decoding:
    """Both models, and how many times faster the packed one is (None without an original)."""

    packed: Speed
    dense: Speed | None
    speedup: float | None


def bench_decoding(directory: str, reference: str | None, device: torch.device) -> Decoding:
    """Load the model in `directory`, and `reference`, and time steps of both, alternately.

    Raises InputError for a directory that is not a readable model.
    """
    names = {"packed": directory} | ({} if reference is None else {"dense": reference})
    places = {kind: model_directory(name) for kind, name in names.items()}
    dtype = torch.bfloat16
    models, peaks = {}, {}
    for kind, place in places.items():
        models[kind], peaks[kind] = _loaded(place, device, dtype)
    steps: dict[str, list[Call]] = {kind: [step(model)] for kind, model in models.items()}
    times = interleaved(steps, device, most_calls=STEPS)
    speeds = {kind: _speed(names[kind], places[kind], times[kind], peaks[kind]) for kind in names}
    dense = speeds.get("dense")
    return Decoding(speeds["packed"], dense, None if dense is None else times["dense"].us / times["packed"].us)


def step(model: PreTrainedModel) -> Callable[[], object]:
    """A call that runs one more token through `model`, into a cache with a short prompt in it."""
    device = next(model.parameters()).device
    cache = StaticCache(config=model.config, max_cache_len=CACHE_TOKENS)
    prompt = torch.arange(PROMPT_TOKENS, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
    token = prompt[:, -1:]
    place = torch.full((1, 1), PROMPT_TOKENS, device=device)
    kept = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    forward = torch.compile(model, dynamic=False) if device.type == "cuda" else model

    def run(ids: torch.Tensor, at: torch.Tensor, call: Callable[..., object]) -> object:
        with torch.no_grad():
            return call(input_ids=ids, use_cache=True, position_ids=at, **{kept: cache})

    run(prompt, torch.arange(PROMPT_TOKENS, device=device).unsqueeze(0), model)
    for _ in range(WARM_UP):
        run(token, place, forward)
    return lambda: run(token, place, forward)


def _loaded(place: Path, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, int | None]:
    """The model, and the most memory that loading it took on a GPU."""
    if device.type != "cuda":
        return load(place, device, dtype), None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model = load(place, device, dtype)
    return model, torch.cuda.max_memory_allocated(device) - before


def _speed(name: str, place: Path, timing: Timing, peak: int | None) -> Speed:
    return Speed(name, timing.us / 1e3, 1e6 / timing.us, Checkpoint.open(place).nbytes, peak)
