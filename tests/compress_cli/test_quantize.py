"""What `compress quantize` says beside the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from compress_llm.compress_cli.main import cli
from compress_llm.formats.replacing import staging_path
from compress_llm.formats.writer import PARTS


@pytest.mark.parametrize("resume", [False, True])
def test_dropping_the_parts_of_a_stopped_run_is_said(tmp_path: Path, resume: bool) -> None:
    out = tmp_path / "out"
    parts = staging_path(out) / PARTS
    parts.mkdir(parents=True)
    (parts / "00000.safetensors").write_bytes(b"of a stopped run")
    arguments = ["quantize", "embedded", "--method", "rtn", "-o", str(out), "--quiet"]
    done = CliRunner().invoke(cli, [*arguments, "--resume"] if resume else arguments)
    said = "Warning: parts of a stopped run are dropped (1); --resume would have gone on with them"
    assert (done.exit_code, said in done.stderr) == (0, not resume)
    assert (out / "config.json").is_file()
