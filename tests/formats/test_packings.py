"""What holds for every packing in the table."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.errors import InputError
from compress_llm.formats.layout import is_exact
from compress_llm.formats.packings import PACKINGS, packing
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES, Scheme

CODED = [name for name, scheme in SCHEMES.items() if scheme.sparsity is None]
SCALE_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_rounded(scheme: Scheme, rows: int, columns: int, dtype: torch.dtype, seed: int) -> Rounded:
    """Codes and zero points anywhere in the grid, positive scales of every magnitude that the dtype has."""
    generator = torch.Generator().manual_seed(seed)
    grid, shape = scheme.grid, (rows, scheme.groups(columns))
    low, high = int(grid.lowest), int(grid.highest) + 1
    codes = torch.randint(low, high, (rows, columns), generator=generator).to(torch.int8)
    limits = torch.finfo(dtype)
    exponents = torch.empty(shape).uniform_(-14 if dtype == torch.float16 else -120, 10, generator=generator)
    scale = torch.exp2(exponents).to(dtype).clamp_(limits.tiny, limits.max)
    zero = None if scheme.symmetric else torch.randint(low, high, shape, generator=generator).to(torch.int8)
    if zero is not None and scheme.zero_dtype == "float":
        zero = (zero + torch.rand(shape, generator=generator)).to(dtype)
    static = scheme.activation is not None and not scheme.activation.dynamic
    return Rounded(
        scheme, codes, QParams(scale, zero), torch.rand(1, generator=generator).to(dtype) if static else None
    )


@st.composite
def any_rounded(draw: st.DrawFn) -> Rounded:
    scheme = draw(st.sampled_from([scheme for scheme in SCHEMES.values() if scheme.rounds]))
    if scheme.packing == "pack-quantized":
        scheme = scheme.with_symmetry(draw(st.booleans()))
    rows, size, groups = draw(st.integers(1, 21)), draw(st.integers(1, 19)), draw(st.integers(1, 5))
    if scheme.groupable:
        scheme = scheme.with_group(draw(st.sampled_from([size, "channel"])))
    dtype, seed = draw(st.sampled_from(SCALE_DTYPES)), draw(st.integers(0, 2**32 - 1))
    return random_rounded(scheme, rows, size * groups, dtype, seed)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@settings(deadline=None, max_examples=150)
@given(rounded=any_rounded())
def test_unpacking_inverts_packing_and_the_layout_is_kept(rounded):
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
    assert same(back.input_scale, rounded.input_scale)


def test_every_scheme_has_its_packing():
    by_layout = {scheme.with_layout(name).packing for scheme in SCHEMES.values() for name in scheme.layouts}
    assert {packing(scheme).name for scheme in SCHEMES.values()} | by_layout == set(PACKINGS)
    assert all(name == row.name for name, row in PACKINGS.items())


def test_an_unknown_packing_names_the_nearest():
    with pytest.raises(InputError, match=r"packing pack-quantised: .* did you mean 'pack-quantized'"):
        packing(replace(SCHEMES["W4A16"], packing="pack-quantised"))


@pytest.mark.parametrize("name", CODED)
def test_every_tensor_is_missed_and_every_wrong_one_named(name):
    scheme = SCHEMES[name].with_group(8) if SCHEMES[name].groupable else SCHEMES[name]
    table = packing(scheme)
    tensors = table.pack(random_rounded(scheme, 6, 24, torch.bfloat16, 0))
    for suffix, tensor in tensors.items():
        wrong = [
            {key: value for key, value in tensors.items() if key != suffix},
            {**tensors, suffix: tensor.to(torch.float64)},
            {**tensors, suffix: tensor[:-1]},
            {**tensors, suffix: tensor[None]},
        ]
        for broken in wrong:
            with pytest.raises(InputError) as caught:
                table.unpack(broken, scheme, (6, 24))
            assert caught.value.key == suffix
    with pytest.raises(InputError, match="weight_g_idx"):
        table.unpack({**tensors, "weight_g_idx": torch.zeros(24)}, scheme, (6, 24))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("broken", ["scale shape", "code dtype", "zero missing or uncalled for"])
def test_a_rounding_that_breaks_its_contract_is_a_bug_not_a_file(name, broken):
    scheme = SCHEMES[name].with_group("channel")
    good = random_rounded(scheme, 6, 24, torch.bfloat16, 0)
    zero = torch.zeros(6, 1, dtype=torch.int8) if scheme.symmetric else None
    bad = {
        "scale shape": replace(good, params=replace(good.params, scale=good.params.scale[:, 0])),
        "code dtype": replace(good, codes=good.codes.short()),
        "zero missing or uncalled for": replace(good, params=replace(good.params, zero=zero)),
    }[broken]
    with pytest.raises(ValueError):  # noqa: PT011  the message is each packing's own
        packing(scheme).pack(bad)
