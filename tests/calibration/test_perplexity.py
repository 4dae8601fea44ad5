"""The evaluator against distributions known on paper, and against full logits in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Cohere2Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

from compress_llm.calibration.perplexity import Measurement, NotFinite, evaluate, first
from compress_llm.calibration.protocols import Window
from compress_llm.formats.errors import InputError


def windows_of(ids: Tensor, length: int) -> list[Window]:
    return [Window(part, len(part) - 1, len(part) - 1) for part in ids.split(length) if len(part) > 1]


def random_ids(size: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed))


def pairs(windows: list[Window]) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for one in windows for a, b in zip(one.ids[:-1], one.ids[1:], strict=True)]


def test_perplexity_is_that_of_the_known_distribution(bigram: Callable) -> None:
    model, table = bigram(11, seed=1, sharpness=3.0)
    windows = windows_of(random_ids(11, 500), 64)
    expected = -sum(math.log(table[a, b]) for a, b in pairs(windows)) / len(pairs(windows))
    measured = evaluate(model, windows)
    assert measured.nll.value == pytest.approx(expected, abs=1e-9)
    assert measured.perplexity is not None
    assert measured.perplexity.value == pytest.approx(math.exp(expected), rel=1e-9)
    assert (measured.tokens_scored, measured.windows) == (500 - 8, 8)
    assert measured.kl is measured.top1_agreement is measured.reference_perplexity is None


def test_kl_and_agreement_are_those_of_the_known_distributions(bigram: Callable) -> None:
    (model, q), (reference, p) = bigram(11, seed=1), bigram(11, seed=2, sharpness=2.0)
    windows = windows_of(random_ids(11, 300), 50)
    seen = [a for a, _ in pairs(windows)]
    kl = sum(float((p[a] * (p[a] / q[a]).log()).sum()) for a in seen) / len(seen)
    agreement = sum(int(p[a].argmax() == q[a].argmax()) for a in seen) / len(seen)
    measured = evaluate(model, windows, reference)
    assert measured.kl is not None
    assert measured.top1_agreement is not None
    assert measured.reference_nll is not None
    assert measured.kl.value == pytest.approx(kl, abs=1e-9)
    assert measured.top1_agreement.value == pytest.approx(agreement, abs=1e-12)
    assert measured.reference_nll.value == pytest.approx(evaluate(reference, windows).nll.value, abs=1e-12)


def test_float32_models_are_measured_to_float32_precision(bigram: Callable) -> None:
    windows = windows_of(random_ids(500, 400), 100)
    exact = evaluate(bigram(500, seed=3)[0], windows, bigram(500, seed=4)[0])
    single = evaluate(bigram(500, seed=3, dtype=torch.float32)[0], windows, bigram(500, seed=4, dtype=torch.float32)[0])
    assert exact.kl is not None
    assert single.kl is not None
    assert single.nll.value == pytest.approx(exact.nll.value, abs=3e-6)
    assert single.kl.value == pytest.approx(exact.kl.value, abs=3e-6)


def test_a_model_has_no_distance_to_itself(bigram: Callable) -> None:
    model, _ = bigram(300, seed=5, dtype=torch.float32)
    measured = evaluate(model, windows_of(random_ids(300, 100), 30), model)
    assert measured.kl is not None
    assert measured.top1_agreement is not None
    assert measured.kl.value == pytest.approx(0.0, abs=1e-7)
    assert measured.kl.value >= 0
    assert measured.top1_agreement.value == 1.0


SIZES = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
CONFIGS = [
    LlamaConfig(**SIZES, **HEADS),
    LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True, attention_bias=True),
    Qwen3Config(**SIZES, **HEADS),
    Gemma2Config(**SIZES, **HEADS, final_logit_softcapping=2.0, sliding_window=16),
    Cohere2Config(**SIZES, **HEADS, logit_scale=0.0625),
    GraniteConfig(**SIZES, **HEADS, logits_scaling=8.0),
    GPT2Config(vocab_size=131, n_embd=32, n_layer=2, n_head=4, n_positions=64),
]


def random_model(config: object, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = Auto.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def naive(model: PreTrainedModel, windows: list[Window]) -> list[Tensor]:
    """Log probabilities [scored, vocabulary] of each window, from full logits."""
    logits = [model(one.ids.unsqueeze(0)).logits[0].double() for one in windows]
    return [part.log_softmax(1)[-1 - one.scored : -1] for part, one in zip(logits, windows, strict=True)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
@torch.no_grad()
def test_real_architectures_against_full_logits(config: object) -> None:
    model, reference = random_model(config, 0), random_model(config, 1)
    ids = random_ids(131, 150)
    windows = [*windows_of(ids[:100], 40), Window(ids[100:140], 10, 10), Window(ids[140:142], 1, 1)]
    q, p = naive(model, windows), naive(reference, windows)
    targets = [one.ids[-one.scored :].unsqueeze(1) for one in windows]
    nll = -torch.cat([a.gather(1, target) for a, target in zip(q, targets, strict=True)]).mean()
    kl = torch.cat([(b.exp() * (b - a)).sum(1) for a, b in zip(q, p, strict=True)]).mean()
    same = torch.cat([a.argmax(1) == b.argmax(1) for a, b in zip(q, p, strict=True)]).double().mean()
    measured = evaluate(model, windows, reference)
    assert measured.kl is not None
    assert measured.top1_agreement is not None
    assert measured.nll.value == pytest.approx(float(nll), abs=1e-9)
    assert measured.kl.value == pytest.approx(float(kl), abs=1e-9)
    assert measured.top1_agreement.value == pytest.approx(float(same), abs=1e-12)
    assert measured.tokens_scored == 39 + 39 + 19 + 10 + 1


def test_window_weights_decide_what_a_window_counts(bigram: Callable) -> None:
    model, _ = bigram(7, seed=1)
    ids = random_ids(7, 20)
    parts = [Window(ids[:10], 9, 10.0), Window(ids[10:], 4, 4.0)]
    single = [evaluate(model, [part]).nll.value for part in parts]
    assert evaluate(model, parts).nll.value == pytest.approx((10 * single[0] + 4 * single[1]) / 14, abs=1e-12)


def test_standard_error_is_that_of_the_mean_over_equal_windows(bigram: Callable) -> None:
    model, _ = bigram(9, seed=2)
    windows = windows_of(random_ids(9, 400), 40)
    means = torch.tensor([evaluate(model, [one]).nll.value for one in windows], dtype=torch.float64)
    measured = evaluate(model, windows)
    assert measured.nll.stderr == pytest.approx(float(means.std() / math.sqrt(10)), rel=1e-9)
    assert measured.perplexity is not None
    assert measured.nll.stderr is not None
    assert measured.perplexity.stderr == pytest.approx(measured.perplexity.value * measured.nll.stderr, rel=1e-9)
    assert evaluate(model, windows, limit=1).nll.stderr is None


def test_limit_takes_the_first_windows(bigram: Callable) -> None:
    model, _ = bigram(9, seed=2)
    windows = windows_of(random_ids(9, 100), 20)
    limited = evaluate(model, windows, limit=2)
    assert limited.windows == 2
    assert limited.nll == evaluate(model, windows[:2]).nll
    assert evaluate(model, windows, limit=99).windows == 5


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_leaves_nothing_is_refused(limit: int) -> None:
    with pytest.raises(InputError, match="--limit"):
        first(windows_of(random_ids(9, 10), 5), limit)


def test_no_windows_are_refused() -> None:
    with pytest.raises(InputError, match="none to score"):
        first([], None)


def test_progress_sees_every_window(bigram: Callable) -> None:
    seen: list[tuple[str, int]] = []

    def track(items: list[Window], label: str, total: int) -> list[Window]:
        seen.append((label, total))
        return items

    evaluate(bigram(9, seed=2)[0], windows_of(random_ids(9, 100), 20), track=track)
    assert seen == [("evaluating", 5)]


def test_models_end_in_evaluation_mode(bigram: Callable) -> None:
    model, _ = bigram(9, seed=2)
    evaluate(model.train(), windows_of(random_ids(9, 10), 5))
    assert not model.training


def test_other_vocabulary_is_refused(bigram: Callable) -> None:
    windows = windows_of(random_ids(9, 10), 5)
    with pytest.raises(InputError, match=r"--reference.*10 tokens"):
        evaluate(bigram(9, seed=2)[0], windows, bigram(10, seed=2)[0])


def test_ids_outside_the_vocabulary_are_refused(bigram: Callable) -> None:
    with pytest.raises(InputError, match="id 9"):
        evaluate(bigram(9, seed=2)[0], [Window(torch.tensor([1, 9]), 1, 1)])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("number", [1, 2])
def test_logits_that_are_not_finite_are_an_error_naming_the_window(
    bigram: Callable, broken: float, number: int
) -> None:
    model, _ = bigram(9, seed=2)

    def break_seven(_module: object, _args: object, named: dict[str, Tensor], output: SimpleNamespace) -> None:
        output.last_hidden_state[named["input_ids"] == 7] = broken

    model.model.register_forward_hook(break_seven, with_kwargs=True)
    sound, bad = (Window(torch.tensor([1, middle, 3]), 2, 2) for middle in (2, 7))
    with pytest.raises(NotFinite, match=f"window {number}: logits of the model"):
        evaluate(model, [bad] if number == 1 else [sound, bad])


def test_a_perplexity_beyond_numbers_is_unknown() -> None:
    from compress_llm.calibration.perplexity import Mean

    assert Measurement(Mean(800.0, 1.0), None, None, None, 1, 1, 1.0).perplexity is None
