"""`pack-quantized` against compressed-tensors' own packer and decoder, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from compress_llm.formats.errors import InputError
from compress_llm.formats.pack_quantized import PackQuantized
from compress_llm.formats.rounded import QParams, Rounded, round_to_grid
from compress_llm.formats.scheme import SCHEMES, Scheme

Maker = Callable[[int, int, torch.Generator], torch.Tensor]
PACKING = PackQuantized()
SCHEMES_HERE = [SCHEMES["W4A16"], SCHEMES["W4A16_ASYM"], SCHEMES["W8A16"], SCHEMES["W8A16"].with_symmetry(False)]
SHAPES: list[tuple[int, int, int | str]] = [
    (16, 128, 32),
    (8, 128, 64),
    (3, 256, 128),
    (10, 120, 24),
    (7, 39, 13),
    (5, 9, 1),
    (13, 19, "channel"),
    (1, 8, "channel"),
    (9, 1, "channel"),
]
BITS_OF = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def gaussian(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator)


def zero_rows_and_columns(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    weight = gaussian(rows, columns, generator)
    weight[::2], weight[:, ::3] = 0, 0
    return weight


def all_zero(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(rows, columns)


def constant_rows(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, 1, generator=generator).repeat(1, columns)


def denormals(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) * 1e-39


def extremes(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    picks = torch.tensor([3.3895313892515355e38, -3.3895313892515355e38, 1.1754944e-38, -9.2e-41, 0.0, 1.0])
    return picks[torch.randint(0, len(picks), (rows, columns), generator=generator)]


def ties(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Halfway between two codes of a scale that is a power of two."""
    return (torch.randint(-9, 9, (rows, columns), generator=generator) + 0.5) * 0.25


def one_outlier(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    weight = gaussian(rows, columns, generator) * 1e-3
    weight[0, -1] = 100.0
    return weight


MAKERS = [gaussian, zero_rows_and_columns, all_zero, constant_rows, denormals, extremes, ties, one_outlier]


def min_max(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> QParams:
    """Scales that span each group, positive and finite in `dtype`, and zero points that hold zero exactly."""
    grouped = weight.double().reshape(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    steps = scheme.grid.highest - scheme.grid.lowest
    reach = high - low if not scheme.symmetric else 2 * torch.maximum(high, -low)
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    scale = (reach / steps).clamp(smallest, torch.finfo(dtype).max).to(dtype)
    if scheme.symmetric:
        return QParams(scale)
    zero = (scheme.grid.lowest - low / scale.double()).round().clamp(scheme.grid.lowest, scheme.grid.highest)
    return QParams(scale, zero.to(torch.int8))


def oracle(scheme: Scheme) -> QuantizationScheme:
    weights = QuantizationArgs(
        num_bits=scheme.grid.bits,
        type="int",
        symmetric=scheme.symmetric,
        strategy=scheme.strategy,
        group_size=scheme.group_size,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    view = BITS_OF.get(one.dtype, one.dtype)
    assert torch.equal(one.contiguous().view(view), other.contiguous().view(view))


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("scheme", SCHEMES_HERE, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tensors_and_decoded_weights_are_those_of_compressed_tensors(maker: Maker, scheme: Scheme, dtype: torch.dtype):
    for seed, (rows, columns, group) in enumerate(SHAPES):
        check_against_oracle(maker(rows, columns, torch.Generator().manual_seed(seed)), scheme.with_group(group), dtype)


@pytest.mark.parametrize("scheme", SCHEMES_HERE, ids=lambda scheme: scheme.name)
def test_half_precision_scales(scheme: Scheme):
    for rows, columns, group in SHAPES:
        weight = gaussian(rows, columns, torch.Generator().manual_seed(rows)).half().float()
        check_against_oracle(weight, scheme.with_group(group), torch.float16)


def check_against_oracle(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> None:
    """Same weight, scales and zero points in; same tensors out of both packers, same weight out of both decoders."""
    weight = weight.to(dtype).float()
    params = min_max(weight, scheme, dtype)
    assert bool((params.scale > 0).all() & params.scale.isfinite().all())
    rounded = round_to_grid(weight, scheme, params)
    ours = PACKING.pack(rounded)
    state = {"weight": weight, "weight_scale": params.scale}
    if params.zero is not None:
        state["weight_zero_point"] = params.zero
    theirs = PackedQuantizationCompressor.compress(state, oracle(scheme))
    assert ours.keys() == theirs.keys()
    for suffix, tensor in ours.items():
        assert_same_bits(tensor, theirs[suffix])
    decoded = PackedQuantizationCompressor.decompress(ours, oracle(scheme))["weight"]
    assert_same_bits(PACKING.unpack(ours, scheme, rounded.shape).dequantize(dtype), decoded)


@pytest.mark.parametrize("scheme", SCHEMES_HERE, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", list(BITS_OF), ids=str)
def test_any_codes_under_any_scales_decode_alike(scheme: Scheme, dtype: torch.dtype):
    """Scales and zero points that no weight asked for: every code against the largest, smallest and denormal scales."""
    scheme = scheme.with_group(16)
    low, high = int(scheme.grid.lowest), int(scheme.grid.highest)
    limits = torch.finfo(dtype)
    scales = [limits.max, limits.max / 300, 1.0, limits.eps, limits.tiny, limits.tiny * limits.eps]
    scale = torch.tensor(scales, dtype=torch.float64).to(dtype).repeat_interleave(16)[:, None]
    codes = torch.arange(low, high + 1).to(torch.int8)[:16].repeat(len(scale), 1)
    zero = torch.linspace(low, high, 16).round().to(torch.int8).repeat(len(scales))[:, None]
    rounded = Rounded(scheme, codes, QParams(scale, None if scheme.symmetric else zero))
    decoded = PackedQuantizationCompressor.decompress(PACKING.pack(rounded), oracle(scheme))["weight"]
    assert_same_bits(rounded.dequantize(dtype), decoded)


def test_the_shape_that_is_stored_must_be_the_layers():
    scheme = SCHEMES["W4A16"].with_group("channel")
    tensors = PACKING.pack(Rounded(scheme, torch.zeros(3, 14, dtype=torch.int8), QParams(torch.ones(3, 1))))
    with pytest.raises(InputError, match=r"weight_shape: says \[3, 14\] for a weight of \[3, 15\]"):
        PACKING.unpack(tensors, scheme, (3, 15))


def test_layout_in_numbers():
    """The sizes of a 576 x 1536 linear as the reference checkpoints have them."""
    layout = PACKING.layout(SCHEMES["W4A16_ASYM"].with_group(64), 576, 1536, torch.bfloat16)
    assert layout == {
        "weight_packed": (torch.int32, (576, 192)),
        "weight_scale": (torch.bfloat16, (576, 24)),
        "weight_zero_point": (torch.int32, (72, 24)),
        "weight_shape": (torch.int64, (2,)),
    }
