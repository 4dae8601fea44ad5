"""A model directory is read by its headers, and every fault in it is named before any weight is read."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress_llm.formats.checkpoint import Checkpoint, resolve
from compress_llm.formats.errors import InputError
from compress_llm.formats.replacing import old_path, staging_path

A, B, C = torch.arange(4.0), torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int8)


def single(folder, config=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    save_file({"a": A, "b": B}, folder / "model.safetensors", {"format": "pt"})
    return folder


def sharded(folder, **index):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B, "c": C}, folder / "model-00002-of-00002.safetensors")
    places = {name: f"model-0000{n}-of-00002.safetensors" for name, n in (("a", 1), ("b", 2), ("c", 2))}
    content = {"metadata": {"total_size": 33}, "weight_map": places, **index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


def refused(folder, cause):
    with pytest.raises(InputError, match=re.escape(cause)) as error:
        Checkpoint.open(folder)
    return error.value


@pytest.mark.parametrize("make", [single, sharded])
def test_reads_tensors_and_bytes(tmp_path, make):
    checkpoint = Checkpoint.open(make(tmp_path / "m"))
    assert torch.equal(checkpoint.read("b"), B)
    taken = bytearray()
    checkpoint.copy_bytes("a", taken.extend)
    assert bytes(taken) == A.numpy().tobytes()
    assert checkpoint.nbytes == sum(info.nbytes for info in checkpoint.tensors.values())
    assert not checkpoint.warnings
    with pytest.raises(InputError, match="not in the checkpoint"):
        checkpoint.read("nothing")


def test_source_hash_sees_config_and_weights_and_nothing_else(tmp_path):
    folder = sharded(tmp_path / "m")
    before = Checkpoint.open(folder).sha256()
    (folder / "LICENSE").write_text("free")
    assert Checkpoint.open(folder).sha256() == before
    save_file({"a": A + 1}, folder / "model-00001-of-00002.safetensors")
    other = Checkpoint.open(folder).sha256()
    (folder / "config.json").write_text('{"x": 1}')
    assert len({before, other, Checkpoint.open(folder).sha256()}) == 3


def test_side_files_are_all_but_weights_and_what_is_rewritten(tmp_path):
    folder = single(tmp_path / "m")
    sides = ["LICENSE", "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt"]
    sides += ["modeling_x.py", "tokenizer.json", "tokenizer.model", "additional_chat_templates/tool.jinja"]
    others = ["README.md", "pytorch_model.bin", "pytorch_model.bin.index.json", ".gitattributes", "model.gguf"]
    others += ["compress_report.json", "consolidated.safetensors", "original/params.json"]
    for name in sides + others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    found = [path.relative_to(folder).as_posix() for path in Checkpoint.open(folder).side_files]
    assert found == sorted(sides)


def test_a_quantised_source_shows(tmp_path):
    assert Checkpoint.open(single(tmp_path / "plain")).quantization is None
    config = {"quantization_config": {"quant_method": "awq"}}
    assert Checkpoint.open(single(tmp_path / "awq", config)).quantization == {"quant_method": "awq"}


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ([], "has no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], "holds an adapter"),
        (["model.Q4_K_M.gguf"], "GGUF"),
        (["config.json"], "has no model.safetensors"),
        (["config.json", "pytorch_model.bin"], "pickled"),
        (["config.json", "model.pt"], "pickled"),
        (["config.json", "consolidated.00.pth"], "pickled"),
        (["config.json", "model-00001-of-00002.safetensors"], "its shards have no model.safetensors.index.json"),
        (["config.json", "consolidated.safetensors"], "neither model.safetensors nor"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_the_fix(tmp_path, files, cause):
    for name in files:
        (tmp_path / name).write_text("{}")
    assert refused(tmp_path, cause).fix


def test_no_directory(tmp_path):
    refused(tmp_path / "none", "is not a directory")


@pytest.mark.parametrize("text", ["", "[1]", '{"a": ', "\xff"])
def test_a_broken_config_is_named(tmp_path, text):
    folder = single(tmp_path / "m")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refused(folder, "JSON").key


@pytest.mark.parametrize(
    ("index", "cause"),
    [
        ({"weight_map": None}, "has no weight_map"),
        ({"weight_map": {"a": 1}}, "not a file name"),
        ({"weight_map": {"a": "model-00003-of-00002.safetensors"}}, "is missing"),
        ({"weight_map": {"a": "../m/model-00001-of-00002.safetensors"}}, "leaves the model directory"),
        ({"weight_map": {"a": "/etc/passwd"}}, "leaves the model directory"),
        ({"weight_map": {"a": "sub/../../x"}}, "leaves the model directory"),
        ({"weight_map": {"a": "..\\x"}}, "leaves the model directory"),
        ({"weight_map": {"a": ""}}, "leaves the model directory"),
        ({"weight_map": {"a": "x\0"}}, "leaves the model directory"),
    ],
)
def test_a_lying_index_is_named(tmp_path, index, cause):
    refused(sharded(tmp_path / "m", **index), cause)


def test_a_tensor_that_is_not_where_the_index_says(tmp_path):
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    everywhere = {"a": first, "b": second, "c": second}
    refused(sharded(tmp_path / "m1", weight_map={**everywhere, "d": first}), "missing from every shard")
    refused(sharded(tmp_path / "m2", weight_map={**everywhere, "b": first}), f"but it is in {second}")


def test_a_tensor_in_two_shards(tmp_path):
    folder = sharded(tmp_path / "m")
    save_file({"a": A, "b": B}, folder / "model-00001-of-00002.safetensors")
    assert "tensor 'b'" in refused(folder, "is in both").key


def test_what_an_index_leaves_out_and_a_wrong_total_only_warn(tmp_path):
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    folder = sharded(tmp_path / "m", weight_map={"a": first, "b": second}, metadata={"total_size": 1})
    checkpoint = Checkpoint.open(folder)
    assert "c" in checkpoint.tensors
    assert ["'c'" in checkpoint.warnings[0], "total_size 1" in checkpoint.warnings[1]] == [True, True]


def test_a_truncated_shard_is_named(tmp_path):
    folder = sharded(tmp_path / "m")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert shard.name in refused(folder, "truncated").key


def test_a_single_file_beside_an_index_of_others_is_ambiguous(tmp_path):
    folder = single(sharded(tmp_path / "m"))
    refused(folder, "readers disagree")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys("ab", "model.safetensors")})
    )
    assert set(Checkpoint.open(folder).tensors) == {"a", "b"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_out_of_the_directory_is_refused(tmp_path, name):
    folder = single(tmp_path / "m")
    (tmp_path / "secret").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    refused(folder, "is a link out of the model directory")


def test_links_inside_the_directory_and_to_it_are_fine(tmp_path):
    folder = single(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "real")
    (folder / "model.safetensors").symlink_to("real")
    (tmp_path / "link").symlink_to("m")
    assert torch.equal(Checkpoint.open(tmp_path / "link").read("a"), A)


def hub(cache, shared=False):
    """A snapshot as huggingface_hub lays it out: links into blobs, which with `shared` link into the cache's store."""
    home = cache / "models--some--model"
    snapshot = home / "snapshots" / "abc123"
    for folder in (snapshot, home / "refs", home / "blobs", cache / "blobs" / "aa"):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text("abc123")
    for name in ("config.json", "model.safetensors"):
        original = single(cache / "made") / name
        blob = home / "blobs" / f"hash-of-{name}"
        if shared:
            original.rename(cache / "blobs" / "aa" / name)
            blob.symlink_to(f"../../blobs/aa/{name}")
        else:
            original.rename(blob)
        (snapshot / name).symlink_to(f"../../blobs/hash-of-{name}")
    return snapshot


@pytest.mark.parametrize("shared", [False, True])
def test_a_hub_snapshot_is_read_through_its_links(tmp_path, monkeypatch, shared):
    snapshot = hub(tmp_path / "cache", shared)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.socket.connect", None)
    assert resolve("some/model") == snapshot
    assert torch.equal(Checkpoint.open(snapshot).read("a"), A)
    with pytest.raises(InputError, match="nor a model in the local Hub cache"):
        resolve("some/other")


def test_a_snapshot_may_not_link_into_another_repository(tmp_path):
    snapshot = hub(tmp_path / "cache")
    stranger = tmp_path / "cache" / "models--evil--model" / "blobs" / "x"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(stranger)
    refused(snapshot, "is a link out of the model directory")


def test_a_side_file_whose_blob_is_gone_is_named(tmp_path):
    folder = single(tmp_path / "m")
    (folder / "tokenizer.json").symlink_to("gone")
    refused(folder, "leads nowhere")


def test_resolve_takes_directories_and_refuses_the_rest(tmp_path):
    folder = single(tmp_path / "m")
    assert resolve(str(folder)) == folder
    for model, cause in ((str(folder / "config.json"), "is a file"), ("", "is empty"), ("a/b/c", "no such directory")):
        with pytest.raises(InputError, match=cause):
            resolve(model)
    with pytest.raises(InputError, match="^--reference: is empty"):
        resolve("", "--reference")


def test_resolve_takes_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(".") == Path(".")


def test_resolve_puts_back_a_directory_whose_replacement_was_cut_off(tmp_path):
    out = tmp_path / "out"
    single(tmp_path / "made").rename(old_path(out))
    (staging_path(out) / "result").mkdir(parents=True)
    (staging_path(out) / "committing").write_text("the old directory is set aside")
    assert resolve(str(out)) == out
    assert torch.equal(Checkpoint.open(out).read("a"), A)
    assert not old_path(out).exists()
