"""What a user installs is what git holds: no file of the package left out, nothing besides."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import compress_llm

ROOT = Path(compress_llm.__file__).resolve().parent
ROOMS = {"calibration", "compress_cli", "formats", "kernels", "quantizers", "sparsifiers"}
BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def files_of_git() -> list[str]:
    """Files in git, and those that are about to be: not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from the files of git alone, away from the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in files_of_git():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def test_every_file_of_the_package_and_no_other(contents: set[str]) -> None:
    paths = map(PurePosixPath, files_of_git())
    at_root = ("__init__.py", "__main__.py", "py.typed")
    expected = {f"compress_llm/{path}" for path in paths if path.parts[0] in ROOMS or str(path) in at_root}
    assert {name for name in contents if ".dist-info/" not in name} == expected


def test_nothing_generic_at_the_top(contents: set[str]) -> None:
    assert {PurePosixPath(name).parts[0] for name in contents} == {
        "compress_llm",
        f"compress_llm-{compress_llm.__version__}.dist-info",
    }


def test_licences_and_the_embedded_default_are_in(contents: set[str]) -> None:
    info = f"compress_llm-{compress_llm.__version__}.dist-info/licenses"
    assets = "compress_llm/calibration/assets"
    assert {
        f"{info}/LICENSE",
        f"{info}/NOTICE",
        f"{assets}/bookllama-7m/LICENSE",
        f"{assets}/bookllama-7m/model.safetensors",
        f"{assets}/text/LICENSE.md",
        f"{assets}/text/wiki-calib.txt",
        f"{assets}/text/wiki-test.txt",
    } <= contents
