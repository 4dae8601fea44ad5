"""A checkout on sys.path puts this folder in front of the Hub's `kernels` package, which transformers asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import import_utils

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import transformers.integrations.hub_kernels
from transformers.utils import is_kernels_available
import kernels
print("available", is_kernels_available())
print("file", kernels.__file__)
"""
RUN = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
print("logits", *AutoModelForCausalLM.from_config(config)(torch.tensor([[1, 2]])).logits.shape)
"""
HUB = """
from unittest.mock import MagicMock
from .inner import Marker
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""


def run(code: str, *paths: Path) -> dict[str, str]:
    """What `code` printed in the checkout, first word -> rest."""
    places = [str(path) for path in paths] + [path for path in sys.path if path and Path(path).resolve() != ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_transformers_runs_with_this_folder_in_the_place_of_the_package():
    said = run(RUN + LOOK)
    assert said == {"available": "False", "logits": "1 2 8", "file": str(ROOT / "kernels" / "__init__.py")}


@pytest.fixture
def hub(tmp_path) -> Path:
    """An installed Hub package of a release that this transformers would use."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(HUB)
    (tmp_path / "kernels" / "inner.py").write_text("class Marker:\n    pass\n")
    info = tmp_path / f"kernels-{import_utils.KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {import_utils.KERNELS_MIN_VERSION}\n"
    )
    (info / "top_level.txt").write_text("kernels\n")
    return tmp_path


def test_transformers_gets_the_package_itself_where_it_is_installed(hub):
    said = run(LOOK + "print('marker', kernels.Marker.__module__)", hub)
    assert said == {"available": "True", "file": str(hub / "kernels" / "__init__.py"), "marker": "kernels.inner"}


def test_the_folder_as_part_of_the_package_hands_nothing_over(hub):
    code = "import compress_llm.kernels as ours; print('has', hasattr(ours, 'Marker'), hasattr(ours, 'Hub'))"
    assert run(code, hub) == {"has": "False False"}


def test_a_name_that_nobody_has_is_an_attribute_error():
    code = "import kernels; print('has', hasattr(kernels, 'get_kernel'), hasattr(kernels, '__wrapped__'))"
    assert run(code) == {"has": "False False"}
