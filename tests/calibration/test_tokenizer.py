"""Special tokens, and when two tokenizers are one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress_llm.calibration import embedded
from compress_llm.calibration.tokenizer import (
    adds_bos,
    encode,
    encode_all,
    ids_sha256,
    load_tokenizer,
    tokenizer_sha256,
)
from compress_llm.formats.errors import InputError


def test_special_tokens_are_added_on_request(word_tokenizer: Callable) -> None:
    tokenizer = word_tokenizer(bos=True)
    assert encode(tokenizer, "w0 w1", special=True).tolist() == [0, 3, 4]
    assert encode(tokenizer, "w0 w1", special=False).tolist() == [3, 4]
    assert encode_all(tokenizer, ["w0", "w1 w1"]) == [[0, 3], [0, 4, 4]]
    assert encode(tokenizer, "", special=False).dtype == torch.int64


def test_which_tokenizers_add_a_bos(word_tokenizer: Callable) -> None:
    assert adds_bos(word_tokenizer(bos=True))
    assert not adds_bos(word_tokenizer())
    assert not adds_bos(word_tokenizer(has_bos=False))


def test_a_copy_or_a_saved_tokenizer_is_the_same_and_another_is_not(tmp_path: Path, word_tokenizer: Callable) -> None:
    tokenizer = load_tokenizer(embedded.model_path())
    tokenizer.save_pretrained(tmp_path / "saved")
    assert tokenizer_sha256(load_tokenizer(tmp_path / "saved")) == tokenizer_sha256(tokenizer)
    assert tokenizer_sha256(word_tokenizer()) != tokenizer_sha256(word_tokenizer(has_bos=False))
    assert tokenizer_sha256(word_tokenizer()) != tokenizer_sha256(tokenizer)


def test_ids_have_a_hash() -> None:
    assert ids_sha256(torch.tensor([1, 2])) == ids_sha256(torch.tensor([1, 2], dtype=torch.int32))
    assert ids_sha256(torch.tensor([1, 2])) != ids_sha256(torch.tensor([2, 1]))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    shutil.copy(embedded.model_path() / "config.json", tmp_path)
    shutil.copy(embedded.model_path() / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match="tokenizer does not load"):
        load_tokenizer(tmp_path)


def test_a_config_that_keeps_a_tokenizer_from_loading_is_named(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.model_path() / name, tmp_path)
    config = json.loads((embedded.model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 3}))
    with pytest.raises(InputError, match="config.json is not understood .*not a multiple of the number of attention"):
        load_tokenizer(tmp_path)
