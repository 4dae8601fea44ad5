"""What the engines that read our directories are known not to manage, by version, so that nobody has to find out twice.

Each note was observed with the versions it names; `applies` tells whether it may concern what is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

PEERS = ("compressed-tensors", "vllm", "sglang")


@dataclass(frozen=True)
class Note:
    """A limitation of another tool: which one, since what version (None: all), and the way around it."""

    peer: str
    text: str
    since: str | None = None
    unless: Callable[[], bool] = lambda: False

    def applies(self, version_of: Callable[[str], str | None]) -> bool:
        """Whether the peer is installed in a version that the note is about."""
        version = version_of(self.peer)
        recent = version is not None and (self.since is None or Version(version) >= Version(self.since))
        return recent and not self.unless()


def _has_avx512() -> bool:
    import torch

    return torch.backends.cpu.get_cpu_capability() == "AVX512" or torch.cuda.is_available()


NOTES = (
    Note(
        "transformers",
        "transformers 5.24 cannot load asymmetric INT4 (W4A16_ASYM) unless it is given "
        "CompressedTensorsConfig(dequantize=True); 5.17 can, and so can compress_llm.load.",
        since="5.18",
    ),
    Note(
        "transformers",
        "CompressedTensorsConfig(dequantize=True) drops the activation quantisation of W8A8 without a word; "
        "compress_llm.load and compress eval-ppl keep it.",
    ),
    Note(
        "vllm",
        "vLLM on a CPU needs AVX512 for INT4 weights, which this one lacks: it loads W4A16 and then finds no kernel.",
        unless=_has_avx512,
    ),
)


def notes(version_of: Callable[[str], str | None]) -> list[str]:
    """The notes that concern what is installed; `version_of` a package is None where it is missing."""
    return [note.text for note in NOTES if note.applies(version_of)]
