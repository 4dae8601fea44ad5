"""The checkout is the package: it must work from inside, where its folders shadow other packages, and from outside."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import compress_llm

ROOT = Path(compress_llm.__file__).resolve().parent


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_module_answers_help(inside: bool, tmp_path: Path) -> None:
    done = python("-m", "compress_llm", "--help", cwd=ROOT if inside else tmp_path)
    assert done.returncode == 0, done.stderr
    assert "quantize" in done.stdout


def test_pytest_as_a_module_collects_everything() -> None:
    """`python -m pytest` puts the checkout on sys.path, where transformers finds `kernels` in place of the Hub's."""
    done = python("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests", cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "tests/test_layout.py::test_module_answers_help[inside]" in done.stdout


def test_importing_the_package_imports_nothing_else(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import compress_llm; print(*sorted(set(sys.modules) - before))"
    loaded = python("-c", code, cwd=tmp_path).stdout.split()
    assert "compress_llm" in loaded
    assert not [name for name in loaded if name.startswith("compress_llm.") or name in ("click", "numpy", "torch")]


def test_kernels_imports_nothing(tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); import kernels; "
    code += "print(*sorted(set(sys.modules) - before))"
    assert python("-c", code, str(ROOT), cwd=tmp_path).stdout.split() == ["kernels"]


@pytest.mark.parametrize("name", ["Recipe", "evaluate", "inspect", "load", "quantize", "verify"])
def test_api_is_there_when_asked_for(name: str) -> None:
    assert name in dir(compress_llm)
    assert callable(getattr(compress_llm, name))


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="quantise"):
        compress_llm.quantise  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_version_is_the_installed_one() -> None:
    try:
        installed = version("compress-llm")
    except PackageNotFoundError:
        pytest.skip("compress-llm is on the path but not installed")
    assert compress_llm.__version__ == installed
