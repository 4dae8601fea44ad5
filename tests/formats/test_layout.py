"""What a packed linear is stored as, and the refusal of anything else."""

import pytest
import torch

from compress_llm.formats.errors import InputError
from compress_llm.formats.layout import (
    Expected,
    check_read,
    check_shape,
    has_input_scale,
    held_to,
    is_exact,
    misfits,
    numbers_of,
    scale_layout,
    scale_tensors,
    stored_scale_dtype,
)
from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES

LAYOUT = {"weight": (torch.int8, (2, 4)), "weight_scale": (torch.float16, (2, 1))}


def good() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(2, 4, dtype=torch.int8), "weight_scale": torch.ones(2, 1, dtype=torch.float16)}


def faulty(suffix: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = good()
    if tensor is None:
        del tensors[suffix]
    else:
        tensors[suffix] = tensor
    return tensors


FAULTS = [
    ("weight", None, "is missing"),
    ("weight", torch.zeros(2, 4), "is float32 [2, 4] where the scheme asks for int8 [2, 4]"),
    ("weight_scale", torch.ones(4, 1, dtype=torch.float16), "is float16 [4, 1] where the scheme asks for"),
    ("weight_g_idx", torch.zeros(4), "has no place in this layout"),
]


@pytest.mark.parametrize(("suffix", "tensor", "cause"), FAULTS)
def test_a_fault_names_its_suffix(suffix, tensor, cause):
    tensors = faulty(suffix, tensor)
    with pytest.raises(InputError) as caught:
        check_read(tensors, LAYOUT)
    assert caught.value.key == suffix
    assert cause in caught.value.cause
    with pytest.raises(ValueError, match=suffix):
        held_to(tensors, LAYOUT)


def test_what_fits_passes():
    tensors = good()
    check_read(tensors, LAYOUT)
    assert held_to(tensors, LAYOUT) is tensors


def test_scales_and_input_scales():
    assert scale_layout(SCHEMES["W4A16"].with_group(24), 7, 120, torch.bfloat16) == {
        "weight_scale": (torch.bfloat16, (7, 5))
    }
    assert scale_layout(SCHEMES["W8A8_STATIC"], 7, 13, torch.float32) == {
        "weight_scale": (torch.float32, (7, 1)),
        "input_scale": (torch.float32, (1,)),
    }
    assert [has_input_scale(SCHEMES[name]) for name in ("W4A16", "W8A8", "W8A8_STATIC")] == [False, False, True]


def test_a_group_size_that_does_not_divide_is_refused():
    with pytest.raises(InputError, match="group size 128: does not divide the 120 inputs"):
        scale_layout(SCHEMES["W4A16"], 7, 120, torch.bfloat16)


def test_a_size_that_is_expected_only_fits_whatever_comes():
    layout = {"a": (torch.int8, (Expected(3),)), "b": (torch.int8, (2,))}
    assert not is_exact(layout) and is_exact({"b": layout["b"]})
    check_read({"a": torch.zeros(9, dtype=torch.int8), "b": torch.zeros(2, dtype=torch.int8)}, layout)
    with pytest.raises(InputError, match=r"a: is int8 \[9, 1\]"):
        check_read({"a": torch.zeros(9, 1, dtype=torch.int8), "b": torch.zeros(2, dtype=torch.int8)}, layout)


def test_scale_dtypes():
    values = {"weight_values": torch.ones(2, dtype=torch.bfloat16)}
    assert stored_scale_dtype(values, SCHEMES["SPARSE50"]) == torch.bfloat16
    assert stored_scale_dtype(good(), SCHEMES["W8A8"]) == torch.float16
    with pytest.raises(InputError, match="weight_scale: is missing"):
        stored_scale_dtype(faulty("weight_scale", None), SCHEMES["W8A8"])
    with pytest.raises(InputError, match="weight_scale: has dtype int32"):
        stored_scale_dtype(faulty("weight_scale", torch.ones(2, 1, dtype=torch.int32)), SCHEMES["W8A8"])


@pytest.mark.parametrize(
    ("name", "zero", "input_scale"),
    [("W4A16", True, False), ("W4A16_ASYM", False, False), ("W8A8", False, True), ("W8A8_STATIC", False, False)],
)
def test_parts_that_a_scheme_does_not_have_are_refused(name, zero, input_scale):
    scheme = SCHEMES[name].with_group("channel")
    params = QParams(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int8) if zero else None)
    rounded = Rounded(scheme, torch.zeros(2, 4, dtype=torch.int8), params, torch.ones(1) if input_scale else None)
    with pytest.raises(ValueError, match=name):
        scale_tensors(rounded)


def test_another_shape_is_refused():
    check_shape({"weight_shape": torch.tensor([2, 3])}, (2, 3))
    with pytest.raises(InputError, match=r"weight_shape: says \[2, 3\]"):
        check_shape({"weight_shape": torch.tensor([2, 3])}, (3, 2))


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_that_are_missing_are_named_as_the_scheme_stores_them(name):
    assert numbers_of(SCHEMES[name]) in packing(SCHEMES[name]).layout(SCHEMES[name], 128, 128, torch.bfloat16)
    with pytest.raises(InputError) as caught:
        stored_scale_dtype({}, SCHEMES[name])
    assert caught.value.key == numbers_of(SCHEMES[name])


def test_sizes_of_another_weight_are_told():
    layout = {"weight": (torch.int8, (4, 2)), "weight_scale": (torch.half, (4, 1)), "input_scale": (torch.half, (1,))}
    assert misfits(good(), layout) == ["weight", "weight_scale"]
    assert misfits(good(), LAYOUT) == misfits(faulty("weight", torch.zeros(2, 4)), LAYOUT) == []
