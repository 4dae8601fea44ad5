"""`load` on plain directories: what `from_pretrained` gives, but strict about tensors."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import compress_llm
from compress_llm.formats.errors import InputError
from compress_llm.kernels.load import load

IDS = torch.tensor([[1, 5, 9, 33, 90, 2, 7, 7]])


@pytest.fixture
def change(save, tmp_path):
    """`change(edit)`: a copy of the tiny Llama whose tensors went through `edit`."""

    def changed(edit) -> Path:
        directory = shutil.copytree(save("llama"), tmp_path / "changed")
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return changed


def test_it_is_the_function_of_the_package():
    assert compress_llm.load is load


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_a_plain_directory_loads_as_transformers_loads_it(save, name):
    expected = AutoModelForCausalLM.from_pretrained(save(name), dtype=torch.float32)
    model = load(str(save(name)))
    assert model.dtype == torch.float32
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)


def test_dtype_can_be_chosen(save):
    assert load(save("llama"), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_missing_tensor_is_named(change):
    directory = change(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(InputError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight': is missing"):
        load(directory)


def test_an_unexpected_tensor_is_named(change):
    directory = change(lambda tensors: tensors.update({"model.stray.weight": torch.ones(3)}))
    with pytest.raises(InputError, match=r"'model\.stray\.weight': has no place"):
        load(directory)


def test_a_tensor_of_another_shape_is_named(change):
    directory = change(lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(InputError, match=r"'model\.norm\.weight': has another shape"):
        load(directory)


def test_several_faults_are_counted(change):
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]

    with pytest.raises(InputError, match=r"up_proj\.weight' \(and 1 more\): is missing"):
        load(change(drop))


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "no-such-model"}'])
def test_what_is_not_a_model_is_an_input_error(save, tmp_path, content):
    if content is not None:
        shutil.copy(save("llama") / "model.safetensors", tmp_path)
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError):
        load(tmp_path)


def test_code_in_the_directory_runs_only_when_asked_to(save, tmp_path, monkeypatch):
    directory = shutil.copytree(save("llama"), tmp_path / "custom")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Model"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Mine(LlamaConfig):\n    model_type = 'mine'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Mine\n"
    )
    with pytest.raises(InputError, match="trust"):
        load(directory)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = load(directory, trust_remote_code=True)
    assert type(model).__module__.endswith(".code")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, load(save("llama"))(IDS).logits)


def test_nothing_is_printed_and_settings_are_put_back(save, capfd):
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(save("llama"))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (level, bars)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to load on")
def test_a_gpu_that_is_not_there_is_named(save):
    with pytest.raises(InputError, match=r"device cuda:1: torch .* sees no CUDA GPU"):
        load(save("llama"), device="cuda:1")
