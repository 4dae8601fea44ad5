"""The choice between methods: by held-out output error, whatever frame a transform left the weights in."""

from __future__ import annotations

import pytest
import torch

from compress_llm.calibration.statistics import Stats
from compress_llm.formats.errors import InputError
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES
from compress_llm.quantizers.auto import Candidate, choose_method
from compress_llm.quantizers.rtn import RTN

W4 = SCHEMES["W4A16"].with_group(16)


def case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 32, generator=generator) * torch.linspace(0.1, 4, 32)
    return torch.randn(12, 32, generator=generator), x.T @ x


def rounded(weight: torch.Tensor, group: int) -> Rounded:
    return RTN.function(weight, W4.with_group(group), None, torch.bfloat16, RTN.options)


def test_the_least_error_wins_and_the_next_is_named() -> None:
    weight, moment = case()
    groups = {"fine": 4, "middle": 16, "coarse": 32}
    candidates = [Candidate(name, [weight], [rounded(weight, g)], moment) for name, g in groups.items()]
    choice = choose_method(candidates[::-1])
    assert (choice.winner, choice.runner_up) == ("fine", "middle")
    expected = (weight - rounded(weight, 4).dequantize()).double()
    share = torch.trace(expected @ moment.double() @ expected.T) / torch.trace(weight.double() @ moment.double() @ weight.T.double())
    assert choice.errors["fine"] == pytest.approx(float(share), rel=1e-4)


def test_a_group_is_judged_as_a_whole() -> None:
    weight, moment = case()
    large = weight * 100
    first = Candidate("good on the large one", [weight, large], [rounded(weight, 32), rounded(large, 4)], moment)
    second = Candidate("good on the small one", [weight, large], [rounded(weight, 4), rounded(large, 32)], moment)
    assert choose_method([second, first]).winner == "good on the large one"


def test_a_transformed_frame_counts_the_same_error() -> None:
    weight, moment = case()
    scale = torch.linspace(0.5, 2, 32).log2().round().exp2()
    stats = Stats(1, second_moment=moment.clone())
    stats.rescale(scale)
    codes = rounded(weight, 16)
    assert stats.second_moment is not None
    moved = weight * scale
    error = codes.dequantize() * scale  # what the same codes mean under the folded scale
    params = QParams(torch.ones(12, 32), None)
    frame = Candidate("folded", [moved - error], [Rounded(W4.with_group(1), torch.zeros(12, 32, dtype=torch.int8), params)], stats.second_moment)
    plain = Candidate("plain", [weight - codes.dequantize()], [Rounded(W4.with_group(1), torch.zeros(12, 32, dtype=torch.int8), params)], moment)
    assert frame.error() == pytest.approx(plain.error(), rel=1e-5) == 1.0


def test_one_candidate_has_no_runner_up_equals_keep_their_order_and_none_is_an_error() -> None:
    weight, moment = case()
    one = Candidate("a", [weight], [rounded(weight, 16)], moment)
    assert choose_method([one]).runner_up is None
    same = Candidate("b", [weight], [rounded(weight, 16)], moment)
    assert choose_method([same, one]).winner == "b"
    zero = Candidate("z", [torch.zeros(12, 32)], [rounded(torch.zeros(12, 32), 16)], moment)
    assert zero.error() == 0.0
    with pytest.raises(InputError, match="no method"):
        choose_method([])
