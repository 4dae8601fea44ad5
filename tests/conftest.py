"""Models and weights that tests share: tiny, random, saved as any other checkpoint. Never for claims of quality."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import Scheme

settings.register_profile("same", derandomize=True, deadline=None)  # every run tries the same examples
settings.load_profile("same")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which any of our dependencies may do

ASSETS = Path(__file__).resolve().parents[1] / "calibration" / "assets"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
}
SaveModel = Callable[..., Path]
MakeRounded = Callable[..., Rounded]


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """`save_model("llama", name, seed=…, dtype=…, shard="…", **config)` → directory of a random model with the embedded
    tokenizer."""
    import transformers

    def save(
        kind: str = "Llama",
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        max_shard_size: str = "1GB",
        **changes: Any,
    ) -> Path:
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, "pad_token_id": 2, **changes})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        directory = tmp_path_factory.mktemp(kind.lower())
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ASSETS / "bookllama-7m" / file, directory / file)
        return directory

    return save


@pytest.fixture(scope="session")
def tiny_llama(save_model: SaveModel) -> Path:
    """A two-block Llama with grouped-query heads and an untied head; never change it in place."""
    return save_model("Llama", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def random_rounded() -> MakeRounded:
    """`random_rounded(scheme, (out, in), dtype, seed)` → any codes and zero points, scales over `binades` binades."""
    return _rounded


def _rounded(
    scheme: Scheme,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    binades: tuple[float, float] = (-14, 4),
) -> Rounded:
    generator = torch.Generator().manual_seed(seed)
    groups = (shape[0], scheme.groups(shape[1]))
    integers = scheme.grid.name.startswith("int")
    low, high = (int(scheme.grid.lowest), int(scheme.grid.highest)) if integers else (0, scheme.grid.top)
    codes = torch.randint(low, high + 1, shape, generator=generator)
    if not integers:
        codes = codes + torch.randint(0, 2, shape, generator=generator) * 2 ** (scheme.grid.bits - 1)
    zero = None if scheme.symmetric else torch.randint(low, high + 1, groups, generator=generator).to(torch.int8)
    if zero is not None and scheme.zero_dtype == "float":
        zero = (zero + torch.rand(groups, generator=generator)).to(dtype)
    scale = torch.exp2(torch.empty(groups).uniform_(*binades, generator=generator))
    count = scheme.sharing_rows(shape[0])
    scale = scale[::count].repeat_interleave(count, 0)[: shape[0]]
    if scheme.scale_grid is None:
        limits = torch.finfo(dtype)
        params = QParams(scale.to(dtype).clamp_(limits.tiny, limits.max), zero)
    else:
        whole = torch.rand(1, generator=generator) * 1000 + 1 if scheme.global_scale else None
        stored = scheme.scale_grid.encode(scale if whole is None else (scale * whole).clamp(2**-9, 448))
        params = QParams(stored, zero, scheme.scale_grid, whole)
    return Rounded(scheme, codes.to(torch.uint8).view(torch.int8), params, _input_scale(scheme, dtype))


def _input_scale(scheme: Scheme, dtype: torch.dtype) -> torch.Tensor | None:
    if scheme.activation is None or scheme.activation.calibrated is None:
        return None
    return torch.tensor([64.0]) if scheme.activation.global_scale else torch.tensor([0.0234375], dtype=dtype)
