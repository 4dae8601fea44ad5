"""Ratios and patterns: what goes together, and what is refused."""

import pytest

from compress_llm.formats.errors import InputError
from compress_llm.formats.scheme import SCHEMES
from compress_llm.formats.sparsity import Sparsity


def test_groups_of_patterns():
    assert (Sparsity().group, Sparsity(pattern="2:4").group, Sparsity(pattern="4:8").group) == (None, (2, 4), (4, 8))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ratio": 0.29}, "--sparsity 0.29: is out of range"),
        ({"ratio": 0.71}, "from 0.3 to 0.7"),
        ({"pattern": "1:4"}, "--pattern 1:4: is no pattern; use one of unstructured, 2:4, 4:8"),
        ({"ratio": 0.6, "pattern": "4:8"}, "is not what pattern 4:8 drops"),
    ],
)
def test_what_no_scheme_can_have(given, words):
    with pytest.raises(InputError, match=words):
        Sparsity(**given)


def test_schemes_change_what_is_asked_for_and_keep_the_rest():
    sparse = SCHEMES["SPARSE50"]
    assert sparse.with_sparsity(None, None) is sparse
    assert sparse.with_sparsity(0.6, None).sparsity == Sparsity(0.6)
    assert sparse.with_sparsity(None, "2:4").sparsity == Sparsity(0.5, "2:4")
    assert sparse.with_layout("bitmap").packing == "compress-bitmap"
    with pytest.raises(InputError, match=r"--sparsity 0\.0: is out of range"):
        sparse.with_sparsity(0.0, None)
    with pytest.raises(InputError, match="--pattern 2:4: scheme W4A16 drops no weights"):
        SCHEMES["W4A16"].with_sparsity(None, "2:4")
    with pytest.raises(InputError, match="SPARSE50 has no scales"):
        sparse.with_group(64)
