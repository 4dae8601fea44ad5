"""The output directory: parts, shards, faults, and a kill at any line."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress_llm.formats import container
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError, StoppedEarly
from compress_llm.formats.headers import read_header
from compress_llm.formats.replacing import old_path, staging_path
from compress_llm.formats.tensor_bytes import sha256_of, sha256_of_file
from compress_llm.formats.writer import OutputDirectory, unfinished_parts

PARTS = {
    0: {"embed": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)},
    1: {"l0.packed": torch.arange(8, dtype=torch.int32), "l0.scale": torch.ones(2, dtype=torch.bfloat16)},
    7: {"l1.packed": torch.arange(9, dtype=torch.int32), "l1.scale": torch.ones(1, dtype=torch.bfloat16)},
}
EVERYTHING = {name: tensor for part in PARTS.values() for name, tensor in part.items()}


def write(out, overwrite=False, resume=False, max_shard_bytes=1 << 20):
    with OutputDirectory(out, overwrite, resume) as output:
        for index, tensors in PARTS.items():
            output.write_part(index, tensors)
        output.assemble(list(PARTS), max_shard_bytes)
        output.add_file("config.json", b"{}")
        output.commit()
    return out


def model(folder, value=5.0):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.tensor([value])}, folder / "model.safetensors")
    return folder


def left(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_one_file_when_it_fits(tmp_path):
    out = write(tmp_path / "deep" / "out")
    assert left(out) == ["config.json", "model.safetensors"]
    assert left(out.parent) == ["out"]
    loaded = load_file(out / "model.safetensors")
    assert loaded.keys() == EVERYTHING.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in EVERYTHING.items())


def test_shards_and_index_when_it_does_not(tmp_path):
    out = write(tmp_path / "out", max_shard_bytes=40)
    checkpoint = Checkpoint.open(out)
    assert [shard.name for shard in checkpoint.shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert not checkpoint.warnings
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in EVERYTHING.items())
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == checkpoint.nbytes
    assert all(read_header(shard).metadata == {"format": "pt"} for shard in checkpoint.shards)


def test_hashes_and_part_bytes(tmp_path):
    save_file({"w": torch.arange(20.0)}, tmp_path / "source")
    stored = read_header(tmp_path / "source").tensors["w"]
    with OutputDirectory(tmp_path / "out", False, False) as output:
        hashes = output.write_part(3, {"copied": stored, **PARTS[1]})
        assert hashes == {"copied": sha256_of(stored), **{name: sha256_of(tensor) for name, tensor in PARTS[1].items()}}
        assert output.assemble([3]) == hashes
        assert output.read_part(3).keys() == hashes.keys()


def test_side_files_are_copied(tmp_path):
    (tmp_path / "LICENSE").write_bytes(b"free\r\n")
    with OutputDirectory(tmp_path / "out", False, False) as output:
        output.add_file("LICENSE", tmp_path / "LICENSE")
        output.add_file("additional_chat_templates/tool.jinja", b"{{ x }}")
        hashes = output.file_hashes()
        output.commit()
    assert hashes == {name: sha256_of_file(tmp_path / "out" / name) for name in sorted(hashes)}
    assert list(hashes) == ["LICENSE", "additional_chat_templates/tool.jinja"]
    assert (tmp_path / "out" / "LICENSE").read_bytes() == b"free\r\n"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").read_bytes() == b"{{ x }}"


def test_a_part_is_there_only_as_it_was_written(tmp_path):
    with OutputDirectory(tmp_path / "out", False, False) as output:
        hashes = output.write_part(1, PARTS[1])
        assert output.has_part(1, hashes)
        assert not output.has_part(2, hashes)
        assert not output.has_part(1, {**hashes, "more": "00"})
        assert not output.has_part(1, {**hashes, "l0.scale": "00"})
        file = output.staging / "parts" / "00001.safetensors"
        whole = file.read_bytes()
        for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
            file.write_bytes(damaged)
            assert not output.has_part(1, hashes)
        output.write_part(1, PARTS[1])
        assert output.has_part(1, hashes)


def test_parts_that_share_a_name_are_a_bug(tmp_path):
    with OutputDirectory(tmp_path / "out", False, False) as output:
        for index in (0, 1):
            output.write_part(index, PARTS[0])
        with pytest.raises(ValueError, match="embed"):
            output.assemble([0, 1])


@pytest.mark.parametrize("resume", [False, True])
def test_resume_keeps_parts_and_a_fresh_start_does_not(tmp_path, resume):
    with OutputDirectory(tmp_path / "out", False, False) as output:
        hashes = output.write_part(0, PARTS[0])
        (output.staging / "journal.json").write_text("{}")
        (output.staging / "journal.json.tmp").write_text("half")
        (output.staging / "parts" / "00001.safetensors.tmp").write_text("half")
        output.add_file("stale", b"")
    assert unfinished_parts(tmp_path / "out") == 1
    with OutputDirectory(tmp_path / "out", False, resume) as output:
        assert output.has_part(0, hashes) == resume
        kept = ["journal.json"] if resume else []
        assert left(output.staging) == sorted([*kept, "lock", "parts", "result"])
        assert left(output.staging / "parts") == (["00000.safetensors"] if resume else [])
        assert not left(output.staging / "result")


def test_two_runs_into_one_directory_refuse(tmp_path):
    with OutputDirectory(tmp_path / "out", False, False) as output:
        hashes = output.write_part(0, PARTS[0])
        for resume in (False, True):
            with pytest.raises(InputError, match="another run is writing it"):
                OutputDirectory(tmp_path / "out", False, resume)
        assert output.has_part(0, hashes)
    OutputDirectory(tmp_path / "out", False, False).discard()


def test_discard_leaves_nothing(tmp_path):
    with OutputDirectory(tmp_path / "out", False, False) as output:
        output.write_part(0, PARTS[0])
        output.discard()
    assert not left(tmp_path)


def test_folders_made_for_nothing_go_again(tmp_path):
    (tmp_path / "kept").mkdir()
    out = tmp_path / "kept" / "deep" / "deeper" / "out"
    with OutputDirectory(out, False, False) as output:
        output.discard()
    assert left(tmp_path) == ["kept"] and not left(tmp_path / "kept")
    with OutputDirectory(out, False, False) as output:
        (out.parent.parent / "of somebody else").touch()
        output.discard()
    assert left(out.parent.parent) == ["of somebody else"]


def refused(cause, out, overwrite=False, source=None):
    before = left(out.parent) if out.parent.is_dir() else None
    with pytest.raises(InputError, match=cause):
        OutputDirectory(out, overwrite, False, source)
    assert (left(out.parent) if out.parent.is_dir() else None) == before


def test_what_may_not_be_written_is_refused_before_anything_is(tmp_path):
    out = model(tmp_path / "out")
    refused("it exists", out)
    refused("lie in one another", out, overwrite=True, source=out)
    refused("lie in one another", out / "packed", source=out)
    refused("lie in one another", tmp_path, overwrite=True, source=out)
    (tmp_path / "source").symlink_to("out")
    refused("lie in one another", tmp_path / "source" / "packed", source=out)
    refused("not a directory", out / "config.json", overwrite=True)
    refused("not a directory", tmp_path / "source", overwrite=True)
    refused("config.json is not a directory", out / "config.json" / "below" / "packed")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    refused("holds something that is no model", tmp_path / "home", overwrite=True)
    old_path(out).mkdir()
    refused("in the way", out, overwrite=True)


def test_overwrite_replaces_a_model(tmp_path):
    out = model(tmp_path / "out")
    write(out, overwrite=True)
    assert left(tmp_path) == ["out"]
    assert load_file(out / "model.safetensors").keys() == EVERYTHING.keys()


def test_a_failed_overwrite_keeps_the_old_model(tmp_path, monkeypatch):
    out = model(tmp_path / "out")
    real = os.rename

    def rename(source, target):
        if Path(target) == out and "partial" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StoppedEarly, match="--resume"):
        write(out, overwrite=True)
    assert load_file(out / "model.safetensors")["w"] == 5
    monkeypatch.undo()
    with OutputDirectory(out, True, resume=True) as output:
        assert all(output.read_part(index).keys() == part.keys() for index, part in PARTS.items())


def test_a_full_disk_stops_early_and_gives_its_room_back(tmp_path, monkeypatch):
    def full(source):
        yield memoryview(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    with OutputDirectory(tmp_path / "out", False, False) as output:
        hashes = output.write_part(0, PARTS[0])
        monkeypatch.setattr(container, "chunks", full)
        with pytest.raises(StoppedEarly, match=r"No space left on device; make room and run again with --resume"):
            output.write_part(1, PARTS[1])
        assert left(output.staging / "parts") == ["00000.safetensors"]
    with OutputDirectory(tmp_path / "out", False, resume=True) as output:
        assert output.has_part(0, hashes)


def test_a_really_full_disk_stops_early(tmp_path, monkeypatch):
    """/dev/full answers every write with ENOSPC."""
    with OutputDirectory(tmp_path / "out", False, False) as output:
        (output.staging / "parts" / "00001.safetensors.tmp").symlink_to("/dev/full")
        with pytest.raises(StoppedEarly, match="No space left"):
            output.write_part(1, PARTS[1])


def test_a_kill_at_any_moment_loses_nothing(tmp_path):
    """In every state that the disk goes through a process ends, by SIGKILL; then comes a reader, and then a resume."""
    script = Path(__file__).with_name("kill_writer.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(int(kills) > 25 for kills in done.stdout.split())


def test_staging_lies_beside_the_output(tmp_path):
    with OutputDirectory(tmp_path / "out", False, False) as output:
        assert output.staging == staging_path(tmp_path / "out") == tmp_path / ".out.partial"
