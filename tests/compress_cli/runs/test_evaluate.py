"""The evaluation journey on tiny models: what is measured, what is refused before the work, what the gate does."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress_llm.calibration import embedded
from compress_llm.compress_cli.runs import evaluate as runs
from compress_llm.compress_cli.runs.evaluate import BOOKS_NOTE, evaluate
from compress_llm.compress_cli.runs.evaluation import Evaluation
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.formats.errors import GateFailed, InputError

SENTENCE = "The old man walked along the river until the evening came, and nobody saw him again. "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(SENTENCE * 12)
    return str(file)


@pytest.fixture(scope="module")
def pair(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its W4A16 copy."""
    model = save_model("Llama", num_hidden_layers=1, initializer_range=0.2)
    out = tmp_path_factory.mktemp("packed") / "out"
    quantize(str(model), out, Recipe(group_size=32))
    return model, out


@torch.no_grad()
def by_hand(directory: Path, text: str, window: int) -> float:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(directory)(Path(text).read_text(), add_special_tokens=False).input_ids
    total, count = 0.0, 0
    for part in torch.tensor(ids).split(window):
        scores = model(part[None]).logits[0, :-1].double().log_softmax(1)
        total -= float(scores.gather(1, part[1:, None]).sum())
        count += len(part) - 1
    return math.exp(total / count)


def test_perplexity_is_that_of_the_model(pair: tuple[Path, Path], text: str) -> None:
    result = evaluate(pair[0], dataset=text, window=32)
    assert result.perplexity == pytest.approx(by_hand(pair[0], text, 32), rel=1e-5)
    assert (result.kl, result.reference.name, result.check.passed, result.limit) == (None, None, None, None)
    assert result.model == pair[0].name
    assert result.dtype == "float32"
    assert result.device == "cpu"
    assert result.attention == "sdpa"
    assert result.tokens_per_second > 0
    assert result.peak_memory_bytes > 1 << 20


def test_a_packed_model_is_measured_against_its_original(pair: tuple[Path, Path], text: str) -> None:
    model, packed = pair
    result = evaluate(packed, dataset=text, window=32, reference=model)
    own = evaluate(model, dataset=text, window=32)
    assert result.reference.name == model.name
    assert result.reference.perplexity == pytest.approx(own.perplexity, rel=1e-6)
    assert result.kl is not None
    assert result.kl > 1e-3
    assert result.top1_agreement is not None
    assert 0 < result.top1_agreement < 1
    assert result.perplexity == pytest.approx(evaluate(packed, dataset=text, window=32).perplexity, rel=1e-6)


def test_a_model_against_itself_is_at_no_distance(pair: tuple[Path, Path], text: str) -> None:
    result = evaluate(pair[0], dataset=text, window=32, reference=pair[0], limit=2)
    assert result.kl == pytest.approx(0.0, abs=1e-7)
    assert result.top1_agreement == 1.0
    assert (result.windows, result.limit, result.tokens_scored) == (2, 2, 62)


def test_float64_is_honoured(pair: tuple[Path, Path], text: str) -> None:
    exact = evaluate(pair[0], dataset=text, window=32, dtype="float64")
    assert exact.dtype == "float64"
    assert exact.perplexity == pytest.approx(evaluate(pair[0], dataset=text, window=32).perplexity, rel=1e-5)


def test_the_window_follows_the_model_unless_it_is_asked_for(pair: tuple[Path, Path], text: str) -> None:
    assert evaluate(pair[0], dataset=text).protocol["window"] == 128
    with pytest.raises(InputError, match="--window 129: the model's context is 128"):
        evaluate(pair[0], dataset=text, window=129)


def test_the_result_is_json_without_gaps(pair: tuple[Path, Path], text: str) -> None:
    content = json.loads(json.dumps(asdict(evaluate(pair[0], dataset=text, window=64)), allow_nan=False))
    wanted = "perplexity perplexity_stderr nll kl top1_agreement tokens_scored windows protocol tokens_per_second"
    assert {*wanted.split(), "peak_memory_bytes", "versions", "reference", "check"} <= content.keys()
    assert {"name", "window", "stride", "bos", "text_sha256"} <= content["protocol"].keys()
    assert content["reference"] == {"name": None, "perplexity": None}
    assert content["check"] == {"passed": None, "reason": None}


def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_named: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(runs, "load", refuse)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"protocol": "wikitext2-2048", "dataset": None}, "context is 128"),
        ({"dataset": "/nowhere.txt"}, "no such file"),
        ({"limit": 0}, "--limit 0"),
        ({"dtype": "float8"}, "--dtype float8"),
        ({"device": "tpu"}, "--device tpu"),
        ({"reference": "/nowhere"}, "/nowhere"),
        ({"check": "/nowhere.json"}, "--check /nowhere.json: it cannot be read"),
        ({"write_baseline": "/nowhere/b.json"}, "--write-baseline /nowhere/b.json"),
        ({"tolerance": -1.0}, "--tolerance -1.0"),
        ({"tolerance": 0.1}, "no baseline to judge by"),
        ({"protocol": "plane"}, "did you mean 'plain'"),
    ],
)
def test_mistakes_are_refused_before_weights_are_read(
    pair: tuple[Path, Path], text: str, monkeypatch: pytest.MonkeyPatch, settings: dict, cause: str
) -> None:
    without_weights(monkeypatch)
    with pytest.raises(InputError) as error:
        evaluate(pair[0], **{"dataset": text, **settings})
    assert cause in str(error.value)


def test_a_protocol_of_another_text_asks_for_it(save_model: Callable[..., Path]) -> None:
    model = save_model("Llama", max_position_embeddings=4096, num_hidden_layers=1)
    with pytest.raises(InputError, match="its text is not embedded"):
        evaluate(model, protocol="wikitext2-4096")


def test_a_reference_with_another_tokenizer_is_refused(
    pair: tuple[Path, Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_weights(monkeypatch)
    other = shutil.copytree(pair[0], tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="its tokenizer is not the model's"):
        evaluate(pair[0], dataset=text, reference=other)


def test_a_reference_whose_tokenizer_cuts_otherwise_is_refused(
    pair: tuple[Path, Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_weights(monkeypatch)
    other = shutil.copytree(pair[0], tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:100]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="its tokenizer is not the model's"):
        evaluate(pair[0], dataset=text, reference=other)


def gate(model: Path, text: str, **settings: object) -> Evaluation:
    return evaluate(model, **{"dataset": text, "window": 32, "limit": 4, **settings})


def test_the_gate_passes_what_is_equal_and_fails_what_is_worse(
    pair: tuple[Path, Path], text: str, tmp_path: Path
) -> None:
    model, packed = pair
    file = tmp_path / "b.json"
    assert gate(packed, text, reference=model, write_baseline=file).check.passed is None
    same = gate(packed, text, reference=model, check=file)
    assert same.check.passed
    assert "unchanged" in str(same.check.reason)
    worse = tmp_path / "worse"
    quantize(str(model), worse, Recipe(group_size="channel"))
    lost = gate(worse, text, reference=model, check=file, write_baseline=tmp_path / "new.json")
    assert lost.check.passed is False
    assert "KL WORSE" in str(lost.check.reason)
    assert not (tmp_path / "new.json").exists()
    better = gate(model, text, reference=model, check=file)
    assert better.check.passed
    assert "KL improved" in str(better.check.reason)


def test_other_evaluations_are_refused_before_weights_are_read(
    pair: tuple[Path, Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, longer = tmp_path / "b.json", tmp_path / "longer.txt"
    gate(pair[0], text, write_baseline=file, reference=pair[0])
    longer.write_text(SENTENCE * 13)
    without_weights(monkeypatch)
    changes = [
        ({"window": 16}, "window is 16 here and 32 there"),
        ({"limit": 3}, "3 windows are scored here and 4 there"),
        ({"bos": "window"}, "bos is window here and none there"),
        ({"dataset": str(longer)}, "text_sha256"),
        ({"protocol": "hf-stride", "window": None}, "name is hf-stride here and plain there"),
        ({"reference": None}, "give --reference"),
    ]
    for change, cause in changes:
        with pytest.raises(InputError) as error:
            gate(pair[0], text, check=file, **{"reference": pair[0], **change})
        assert cause in str(error.value)


def test_a_broken_model_is_an_error_and_under_the_gate_a_failure(
    pair: tuple[Path, Path], text: str, tmp_path: Path
) -> None:
    file = tmp_path / "b.json"
    gate(pair[0], text, write_baseline=file)
    broken = shutil.copytree(pair[0], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="window 1: logits of the model are NaN"):
        gate(broken, text)
    with pytest.raises(GateFailed, match="window 1: logits of the model are NaN"):
        gate(broken, text, check=file)


def test_the_embedded_model_on_the_embedded_text_comes_with_a_note(
    pair: tuple[Path, Path], text: str, tmp_path: Path
) -> None:
    result = evaluate(limit=1, window=64)
    assert (result.model, result.dataset["name"]) == (embedded.MODEL_NAME, "embedded/wiki-test.txt")
    assert result.notes == (BOOKS_NOTE,)
    assert 50 < (result.perplexity or 0) < 2000
    assert evaluate("embedded", dataset=text, limit=1, window=64).notes == ()
    assert evaluate(pair[0], limit=1, window=64).notes == ()  # another model with the same tokenizer
