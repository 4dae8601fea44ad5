"""What holds for every packing in the table."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.errors import InputError
from compress_llm.formats.float_grids import E8M0
from compress_llm.formats.layout import is_exact
from compress_llm.formats.packings import PACKINGS, check_stored, packing
from compress_llm.formats.scheme import SCHEMES, Scheme

CODED = [name for name, scheme in SCHEMES.items() if scheme.sparsity is None]
SCALE_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@st.composite
def any_case(draw: st.DrawFn) -> tuple[Scheme, tuple[int, int], torch.dtype, int]:
    scheme = draw(st.sampled_from([scheme for scheme in SCHEMES.values() if scheme.rounds]))
    if scheme.packing == "pack-quantized":
        scheme = scheme.with_symmetry(draw(st.booleans()))
    rows, size, groups = draw(st.integers(1, 21)), draw(st.integers(1, 19)), draw(st.integers(1, 5))
    if scheme.groupable:
        scheme = scheme.with_group(draw(st.sampled_from([size, "channel"])))
    rows = rows * 10 if scheme.block_rows > 1 else rows
    columns = groups * (size if scheme.groupable or scheme.group_size is None else scheme.group_size)
    return scheme, (rows, columns), draw(st.sampled_from(SCALE_DTYPES)), draw(st.integers(0, 2**32 - 1))


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@settings(deadline=None, max_examples=150)
@given(case=any_case())
def test_unpacking_inverts_packing_and_the_layout_is_kept(random_rounded, case):
    rounded = random_rounded(*case, binades=(-120, 10) if case[2] != torch.float16 else (-14, 10))
    table = packing(rounded.scheme)
    tensors = table.pack(rounded)
    layout = table.layout(rounded.scheme, *rounded.shape, rounded.params.scale.dtype)
    found = {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in tensors.items()}
    assert is_exact(layout) == (rounded.scheme.sparsity is None)
    assert found == layout if is_exact(layout) else list(found) == list(layout)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    back = table.unpack(tensors, rounded.scheme, rounded.shape)
    assert back.scheme == rounded.scheme
    assert same(back.codes, rounded.codes)
    assert same(back.params.scale, rounded.params.scale)
    assert same(back.params.zero, rounded.params.zero)
    assert back.params.grid == rounded.params.grid
    assert same(back.params.global_scale, rounded.params.global_scale)
    assert same(back.input_scale, rounded.input_scale)


def test_every_scheme_has_its_packing():
    by_layout = {scheme.with_layout(name).packing for scheme in SCHEMES.values() for name in scheme.layouts}
    assert {packing(scheme).name for scheme in SCHEMES.values()} | by_layout == set(PACKINGS)
    assert all(name == row.name for name, row in PACKINGS.items())


def test_an_unknown_packing_names_the_nearest():
    with pytest.raises(InputError, match=r"packing pack-quantised: .* did you mean 'pack-quantized'"):
        packing(replace(SCHEMES["W4A16"], packing="pack-quantised"))


@pytest.mark.parametrize("name", CODED)
def test_every_tensor_is_missed_and_every_wrong_one_named(random_rounded, name):
    scheme = SCHEMES[name].with_group(8) if SCHEMES[name].groupable else SCHEMES[name]
    table, shape = packing(scheme), (6, 128)
    tensors = table.pack(random_rounded(scheme, shape))
    for suffix, tensor in tensors.items():
        wrong = [
            {key: value for key, value in tensors.items() if key != suffix},
            {**tensors, suffix: tensor.to(torch.float64)},
            {**tensors, suffix: tensor[:-1]},
            {**tensors, suffix: tensor[None]},
        ]
        for broken in wrong:
            with pytest.raises(InputError) as caught:
                table.unpack(broken, scheme, shape)
            assert caught.value.key == suffix
    with pytest.raises(InputError, match="weight_g_idx"):
        table.unpack({**tensors, "weight_g_idx": torch.zeros(24)}, scheme, shape)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("broken", ["scale shape", "code dtype", "zero missing or uncalled for", "scale kind"])
def test_a_rounding_that_breaks_its_contract_is_a_bug_not_a_file(random_rounded, name, broken):
    scheme = SCHEMES[name]
    good = random_rounded(scheme, (6, 128))
    zero = torch.zeros(6, 1, dtype=torch.int8) if scheme.symmetric else None
    params = good.params
    bad = {
        "scale shape": replace(good, params=replace(params, scale=params.scale[:, 0])),
        "code dtype": replace(good, codes=good.codes.short()),
        "zero missing or uncalled for": replace(good, params=replace(params, zero=zero)),
        "scale kind": replace(good, params=replace(params, grid=None if params.grid else E8M0)),
    }[broken]
    with pytest.raises(ValueError):  # noqa: PT011  the message is each packing's own
        packing(scheme).pack(bad)


@pytest.mark.parametrize("name", ["FP8", "FP8_BLOCK", "W8A8_BLOCK"])
def test_rows_that_share_a_scale_must_have_one(random_rounded, name):
    good = random_rounded(SCHEMES[name], (6, 128))
    scale = good.params.scale.clone()
    scale[1] *= 2
    with pytest.raises(ValueError, match="rows of one block have different scales"):
        packing(good.scheme).pack(replace(good, params=replace(good.params, scale=scale)))


@settings(deadline=None, max_examples=30)
@given(case=any_case())
def test_contents_that_were_packed_pass_and_headers_will_do_for_the_layout(random_rounded, case):
    rounded = random_rounded(*case, binades=(-10, 10))
    tensors = packing(rounded.scheme).pack(rounded)
    packing(rounded.scheme).check_contents(tensors, rounded.scheme, rounded.shape)
    headers = {suffix: tensor.to("meta") for suffix, tensor in tensors.items()}
    check_stored(headers, rounded.scheme, rounded.shape)
    for suffix in headers:
        with pytest.raises(InputError) as caught:
            check_stored({key: found for key, found in headers.items() if key != suffix}, rounded.scheme, rounded.shape)
        assert caught.value.key == suffix
