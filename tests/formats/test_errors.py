"""The sentence, the exit code and the nearest name."""

import copy

import pytest

from compress_llm.formats.errors import CompressError, GateFailed, InputError, StoppedEarly, inside, nearest


@pytest.mark.parametrize(("kind", "code"), [(InputError, 2), (GateFailed, 1), (StoppedEarly, 3)])
def test_each_kind_has_its_exit_code_and_is_caught_as_one_family(kind, code):
    with pytest.raises(CompressError) as caught:
        raise kind("--group-size 7", "does not divide 64", "use 8")
    assert caught.value.exit_code == code
    assert str(caught.value) == "--group-size 7: does not divide 64; use 8."
    assert (caught.value.key, caught.value.cause, caught.value.fix) == ("--group-size 7", "does not divide 64", "use 8")


def test_the_sentence_is_one_line_and_the_key_as_it_was_written():
    assert str(InputError("a  b", "says:\n\n  this\nand that ", "c")) == "a  b: says: this and that; c."


def test_errors_are_rebuilt_whole():
    """Copies go through the same protocol as a worker process handing its error to its parent."""
    error = copy.deepcopy(InputError("a", "b", "c"))
    assert type(error) is InputError
    assert str(error) == "a: b; c."


def test_a_suffix_becomes_the_name_of_a_tensor():
    with pytest.raises(InputError, match="^a.b.weight_scale: is missing; use a copy.$"), inside("a.b"):
        raise InputError("weight_scale", "is missing", "use a copy")
    with pytest.raises(GateFailed, match="^a: b; c.$"), inside("a.b"):
        raise GateFailed("a", "b", "c")


@pytest.mark.parametrize(
    ("word", "hint"),
    [("W4A61", "did you mean 'W4A16'"), ("w8a8", "did you mean 'W8A8'"), ("zzz", "use one of W4A16, W8A8")],
)
def test_nearest(word, hint):
    assert nearest(word, ["W4A16", "W8A8"]) == hint
