"""A quantise run before it runs: everything is looked up, checked and sized, and no weight has been read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...calibration import embedded
from ...calibration.compute import probed_dtype
from ...calibration.sources import read_source
from ...calibration.tokenizer import load_tokenizer
from ...calibration.windows import Windows, calibration_windows
from ...formats.checkpoint import Checkpoint
from ...formats.container import Spec, container_bytes, split
from ...formats.errors import InputError
from ...formats.quantization_config import build
from ...formats.writer import MAX_SHARD_BYTES
from ...quantizers.scales import resolve as resolve_rule
from .device import pick_device
from .memory import check_memory, peak_memory_estimate
from .methods import Chain, chain, check_fit, fields_wanted
from .plain_json import to_json
from .plan import Plan, ignored_modules, make_plan
from .recipe import Recipe
from .unknown import check_modules


@dataclass(frozen=True)
class Job:
    """A run that has passed every check that headers allow."""

    model: str
    plan: Plan
    methods: Chain
    windows: Windows | None
    dataset: dict[str, Any] | None
    device: str
    compute_dtype: torch.dtype
    trust_remote_code: bool
    batch_size: int
    peak_memory: int
    output_bytes: int

    @property
    def argument(self) -> str:
        """What names the model on the command line, without the folders of this machine."""
        return embedded.EMBEDDED if self.plan.checkpoint.directory == embedded.model_path() else self.model

    @property
    def warnings(self) -> list[str]:
        """What the user should know before and after."""
        return [
            *self.plan.checkpoint.warnings,
            *self.plan.warnings,
            *(self.windows.warnings if self.windows is not None else ()),
        ]


def prepare(
    model: str | None,
    recipe: Recipe,
    *,
    device: str = "auto",
    max_memory: int | None = None,
    trust_remote_code: bool = False,
) -> Job:
    """Everything before the first weight is read. Raises InputError for whatever cannot work."""
    directory = embedded.model_directory(model)
    checkpoint = Checkpoint.open(directory)
    methods = chain(recipe)
    plan = make_plan(recipe, checkpoint, methods.fitted)
    schemes = {layer.scheme for layer in plan.quantized if layer.scheme is not None}
    check_fit(methods, schemes, recipe)
    check_modules(plan, trust_remote_code)
    calibrated = bool(fields_wanted(methods, schemes)) or recipe.dataset is not None
    estimate = peak_memory_estimate(plan, calibrated)
    check_memory(estimate, max_memory)
    windows, dataset = None, None
    if calibrated:
        windows, dataset = _calibration_text(directory, recipe, trust_remote_code)
    place = str(pick_device(device))
    return Job(
        model=embedded.shown_name(model),
        plan=plan,
        methods=methods,
        windows=windows,
        dataset=dataset,
        device=place,
        compute_dtype=_compute_dtype(recipe, place, plan),
        trust_remote_code=trust_remote_code,
        batch_size=_batch_size(recipe, methods, windows),
        peak_memory=estimate,
        output_bytes=_output_bytes(plan),
    )


def config_json(plan: Plan) -> str:
    """The output's config.json: the source's, with `quantization_config`, and untied when the head is packed."""
    schemes = {layer.name: layer.scheme for layer in plan.quantized if layer.scheme is not None}
    config: dict[str, Any] = dict(plan.checkpoint.config)
    if plan.packs_head:
        config["tie_word_embeddings"] = False
    order = "static" if "gptq" in plan.recipe.methods else None
    config["quantization_config"] = build(schemes, ignored_modules(plan), order, _scale_rules(plan))
    return to_json(config) + "\n"


def _scale_rules(plan: Plan) -> dict[str, str]:
    """By name of scheme how its scales are chosen; `auto` has no one answer."""
    methods = chain(plan.recipe)
    if methods.auto or "scale_rule" not in methods.options:
        return {}
    schemes = {layer.scheme for layer in plan.quantized if layer.scheme is not None and layer.scheme.rounds}
    return {scheme.name: resolve_rule(methods.options["scale_rule"], scheme) for scheme in schemes}


def _output_bytes(plan: Plan) -> int:
    """Bytes of the weight files, config.json and the side files; report and index apart."""
    sides = sum(file.stat().st_size for file in plan.checkpoint.side_files)
    specs = {name: Spec(dtype, shape) for name, (dtype, shape) in plan.tensors.items()}
    shards = split(specs, MAX_SHARD_BYTES)
    weights = sum(container_bytes({name: specs[name] for name in names}) for names in shards)
    return weights + len(config_json(plan).encode()) + sides


def _calibration_text(directory: Path, recipe: Recipe, trust_remote_code: bool) -> tuple[Windows, dict[str, Any]]:
    corpus = read_source(recipe.dataset or "embedded", "calibration")
    tokenizer = load_tokenizer(directory, trust_remote_code)
    windows = calibration_windows(corpus, tokenizer, recipe.num_samples, recipe.seq_len, recipe.seed)
    return windows, {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "tokens": windows.tokens,
        "windows": windows.ids.shape[0],
    }


def _batch_size(recipe: Recipe, methods: Chain, windows: Windows | None) -> int:
    """Windows that go through a block together; `auto` holds out whole batches and so needs four, or at least two."""
    if windows is None or not methods.auto:
        return recipe.batch_size
    count = windows.ids.shape[0]
    if count < 2:
        raise InputError(
            "--method auto", "has one window of text and must hold some out", "give --num-samples 4 or more"
        )
    return min(recipe.batch_size, max(1, count // 4))


def _compute_dtype(recipe: Recipe, device: str, plan: Plan) -> torch.dtype:
    """What blocks compute in: `--dtype`, else the checkpoint's own on a GPU and the faster one on a CPU."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if recipe.dtype is not None:
        if recipe.dtype not in names:
            raise InputError(f"--dtype {recipe.dtype}", "is not a dtype to compute in", "use " + ", ".join(names))
        return names[recipe.dtype]
    if device == "cpu":
        return probed_dtype()
    return plan.checkpoint.tensors[plan.quantized[0].source].dtype
