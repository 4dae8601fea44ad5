"""The evaluation journey: a model directory, a text and a protocol to a perplexity, and KL beside a reference.

Also the Python API, `compress_llm.evaluate`. Whatever can be refused is refused before the first weight is read; the
arithmetic is in `calibration/perplexity.py`, the gate in `calibration/baseline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...calibration import baseline as gate
from ...calibration import embedded, perplexity, protocols
from ...calibration.perplexity import Measurement, NotFinite
from ...calibration.protocols import Bos, Cut
from ...calibration.sources import EMBEDDED, Corpus, read_source
from ...calibration.tokenizer import check_same, load_tokenizer, tokenizer_sha256
from ...formats.errors import GateFailed, InputError, nearest
from ...formats.progress import Track, silent
from ...kernels.load import load
from ...kernels.skeleton import read_config
from .device import pick_device
from .evaluation import Evaluation, ReferenceScore, Verdict
from .report import peak_memory_bytes, versions

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DEFAULT_PROTOCOL = "plain"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_TELLING = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers")
BOOKS_NOTE = (
    "this model knows books, not Wikipedia: on the embedded text its perplexity is far above the thirties it has on "
    "books and tells little; the figure to read here is the KL to the original (--reference)"
)


@dataclass(frozen=True)
class _Task:
    """An evaluation that has passed every check that needs no weights."""

    directory: Path
    reference: Path | None
    corpus: Corpus
    cut: Cut
    subject: gate.Subject
    device: torch.device
    dtype: torch.dtype
    notes: tuple[str, ...]


def evaluate(
    model: str | Path | None = None,
    *,
    dataset: str | None = None,
    protocol: str = DEFAULT_PROTOCOL,
    window: int | None = None,
    stride: int | None = None,
    bos: Bos | None = None,
    limit: int | None = None,
    reference: str | Path | None = None,
    write_baseline: str | Path | None = None,
    check: str | Path | None = None,
    tolerance: float | None = None,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    track: Track = silent,
) -> Evaluation:
    """Evaluate `model`: a packed or plain directory, a cached Hub id, None or `embedded` for the embedded default.

    `dataset` is a SOURCE (the embedded test text by default), `reference` a model to measure KL to. `check` compares
    with a baseline file, and the verdict is in the result; `write_baseline` makes one, unless the check failed. Raises
    InputError for whatever cannot be evaluated or compared, and GateFailed when a checked model gives logits that are
    not finite.
    """
    new_file, check_file = (None if file is None else Path(file) for file in (write_baseline, check))
    if new_file is not None:
        gate.check_writable(new_file)
    if tolerance is not None:
        gate.check_tolerance(tolerance)
        if check_file is None and new_file is None:
            raise InputError("--tolerance", "there is no baseline to judge by", "add --check or --write-baseline")
    baseline = None if check_file is None else gate.read_baseline(check_file)
    rules = {"name": protocol, "window": window, "stride": stride, "bos": bos}
    task = _prepare(model, reference, dataset, rules, limit, device, dtype, trust_remote_code)
    if baseline is not None and check_file is not None:
        gate.check_comparable(check_file, baseline, task.subject, reference is not None)
    measured, attention = _measure(task, trust_remote_code, check_file, track)
    score = _score(measured)
    verdict: gate.Check | Verdict = Verdict()
    if baseline is not None and check_file is not None:
        verdict = gate.judge(check_file, baseline, score, tolerance)
    original = None if reference is None else embedded.shown_name(reference)
    result = _result(task, measured, attention, limit, embedded.shown_name(model), original, verdict)
    if new_file is not None and verdict.passed is not False:
        about = {"model": result.model, "reference": result.reference.name, "dtype": result.dtype}
        about |= {"device": result.device, "versions": dict(result.versions)}
        allowed = gate.DEFAULT_TOLERANCE if tolerance is None else tolerance
        gate.write_baseline(new_file, gate.Baseline(task.subject, score, allowed, about))
    return result


def _prepare(
    model: str | Path | None,
    reference: str | Path | None,
    dataset: str | None,
    rules: Mapping[str, Any],
    limit: int | None,
    device: str,
    dtype: str | None,
    trust_remote_code: bool,
) -> _Task:
    directory = embedded.model_directory(model)
    original = None if reference is None else embedded.model_directory(reference, "--reference")
    config = read_config(directory, trust_remote_code)
    row = protocols.protocol(**rules, longest=_longest(config))
    if dataset is None and row.text_sha256 is not None:
        raise InputError(
            f"--protocol {row.name}", "its text is not embedded", "give WikiText-2's raw test split as --dataset"
        )
    place = pick_device(device)
    corpus = read_source(dataset or EMBEDDED, "test")
    tokenizer = load_tokenizer(directory, trust_remote_code)
    if original is not None:
        check_same(tokenizer, load_tokenizer(original, trust_remote_code), corpus.text())
    cut = row.cut(corpus, tokenizer)
    identity = tokenizer_sha256(tokenizer)
    return _Task(
        directory=directory,
        reference=original,
        corpus=corpus,
        cut=cut,
        subject=gate.Subject(cut.record, identity, len(perplexity.first(cut.windows, limit))),
        device=place,
        dtype=_dtype(dtype, place, config),
        notes=(BOOKS_NOTE,) if _is_book_model_on_wiki(corpus, identity, config) else (),
    )


def _measure(
    task: _Task, trust_remote_code: bool, check_file: Path | None, track: Track
) -> tuple[Measurement, str | None]:
    """The figures, and which attention gave them."""
    if task.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(task.device)

    def loaded(directory: Path) -> PreTrainedModel:
        return load(directory, device=str(task.device), dtype=task.dtype, trust_remote_code=trust_remote_code)

    subject = loaded(task.directory)
    original = None if task.reference is None else loaded(task.reference)
    attention = getattr(subject.config, "_attn_implementation", None)
    try:
        return perplexity.evaluate(subject, task.cut.windows, original, task.subject.windows, track), attention
    except NotFinite as error:
        if check_file is None:
            raise
        raise GateFailed(error.key, error.cause, error.fix) from error


def _score(measured: Measurement) -> gate.Score:
    own, original = measured.perplexity, measured.reference_perplexity
    return gate.Score(
        perplexity=None if own is None else own.value,
        kl=None if measured.kl is None else measured.kl.value,
        reference_perplexity=None if original is None else original.value,
    )


def _result(
    task: _Task,
    measured: Measurement,
    attention: str | None,
    limit: int | None,
    model: str,
    reference: str | None,
    verdict: gate.Check | Verdict,
) -> Evaluation:
    score = _score(measured)
    on_gpu = task.device.type == "cuda"
    warnings = list(task.cut.warnings)
    if score.perplexity is None:
        warnings.append(f"the perplexity of a mean surprise of {measured.nll.value:.4g} nats is too large for a number")
    return Evaluation(
        model=model,
        perplexity=score.perplexity,
        perplexity_stderr=None if measured.perplexity is None else measured.perplexity.stderr,
        nll=measured.nll.value,
        nll_stderr=measured.nll.stderr,
        kl=score.kl,
        kl_stderr=None if measured.kl is None else measured.kl.stderr,
        top1_agreement=None if measured.top1_agreement is None else measured.top1_agreement.value,
        tokens_scored=measured.tokens_scored,
        windows=measured.windows,
        protocol=task.cut.record,
        limit=limit,
        dataset={"name": task.corpus.name, "sha256": task.corpus.sha256},
        tokenizer_sha256=task.subject.tokenizer_sha256,
        reference=ReferenceScore(reference, score.reference_perplexity),
        check=Verdict(verdict.passed, verdict.reason),
        tokens_per_second=measured.tokens_scored / measured.seconds,
        seconds=measured.seconds,
        peak_memory_bytes=torch.cuda.max_memory_allocated(task.device) if on_gpu else peak_memory_bytes(),
        device=str(task.device),
        dtype=str(task.dtype).removeprefix("torch."),
        attention=attention,
        versions=versions(),
        warnings=tuple(warnings),
        notes=task.notes,
    )


def _longest(config: PretrainedConfig) -> int | None:
    """The longest context that the model's positions allow, None where they have no end."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(longest) if longest else None


def _dtype(name: str | None, device: torch.device, config: PretrainedConfig) -> torch.dtype:
    """`--dtype`, else float32 on a CPU, where bf16 products are slow, and the checkpoint's own on a GPU."""
    if name is not None:
        if name not in DTYPES:
            raise InputError(f"--dtype {name}", "is not a dtype to compute in", nearest(name, DTYPES))
        return DTYPES[name]
    own = getattr(config.get_text_config(), "dtype", None)
    return own if device.type == "cuda" and isinstance(own, torch.dtype) else torch.float32


def _is_book_model_on_wiki(corpus: Corpus, identity: str, config: PretrainedConfig) -> bool:
    """Whether the embedded model, or one made from it, meets the embedded text. Told by the tokenizer and the sizes."""
    if corpus.sha256 != read_source(EMBEDDED, "test").sha256:
        return False
    own = read_config(embedded.model_path())
    if any(getattr(config, name, None) != getattr(own, name) for name in _TELLING):
        return False
    return identity == tokenizer_sha256(load_tokenizer(embedded.model_path()))
