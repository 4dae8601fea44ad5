"""Naming linears in `quantization_config`: compact, disjoint, and read as compressed-tensors reads it."""

import pytest
import torch
from compressed_tensors.utils.match import match_named_modules, match_targets
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.errors import InputError
from compress_llm.formats.targets import matched, written

NAMES = [f"model.layers.{block}.{part}" for block in (0, 1, 11) for part in ("q_proj", "mlp.up_proj", "mlp.down_proj")]
EXPERTS = [
    f"model.layers.{block}.experts.{expert}.w{part}" for block in (0, 1) for expert in (0, 10) for part in (1, 2)
]
ALL = [*NAMES, *EXPERTS, "lm_head", "model.vision.layers.0.q_proj"]


def by_compressed_tensors(targets: dict[str, int], ignored: list[str], names: list[str]) -> dict[str, int]:
    model = torch.nn.Module()
    for name in names:
        parent = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(1, 1, device="meta"))
    found = [pair for pair in match_named_modules(model, targets, ignored) if isinstance(pair[1], torch.nn.Linear)]
    return {name: targets[match_targets(name, module, targets)[0]] for name, module in found}


@pytest.mark.parametrize(
    ("targets", "ignored"),
    [
        ({"Linear": 0}, ["lm_head"]),
        ({"Linear": 0}, ["re:.*vision.*", "lm_head"]),
        ({"Linear": 0}, ["Linear"]),
        ({"Linear": 0, "re:.*q_proj": 1, NAMES[0]: 2}, []),
        ({"re:.*layers.0.*": 1, "re:.*up_proj": 2, "re:.*q_proj$": 3}, [NAMES[1]]),
        ({"re:q_proj": 1, "re:model.layers.1": 2}, []),
        ({"model.layers.7.nowhere": 1, "lm_head": 2}, []),
    ],
)
def test_reading_follows_compressed_tensors(targets, ignored):
    assert matched(targets, ignored, ALL) == by_compressed_tensors(targets, ignored, ALL)


@settings(deadline=None, max_examples=40)
@given(owners=st.lists(st.integers(0, 3), min_size=len(ALL), max_size=len(ALL)))
def test_what_is_written_means_the_same_to_us_and_to_compressed_tensors(owners):
    groups = [[name for name, owner in zip(ALL, owners, strict=True) if owner == index] for index in range(3)]
    others = [name for name, owner in zip(ALL, owners, strict=True) if owner == 3]
    targets = written(groups, others)
    flat = {target: index for index, part in enumerate(targets) for target in part}
    assert len(flat) == sum(map(len, targets))
    expected = {name: owner for name, owner in zip(ALL, owners, strict=True) if owner < 3}
    assert matched(flat, others, ALL) == expected
    assert matched(flat, [], ALL) == expected
    assert by_compressed_tensors(flat, others, ALL) == expected


def test_the_same_linear_of_every_block_is_one_pattern():
    groups = [EXPERTS, [name for name in NAMES if "mlp" in name]]
    assert written(groups, ["lm_head", NAMES[0]]) == [
        [
            r"re:^model\.layers\.[0-9]+\.experts\.[0-9]+\.w1$",
            r"re:^model\.layers\.[0-9]+\.experts\.[0-9]+\.w2$",
        ],
        [r"re:^model\.layers\.[0-9]+\.mlp\.up_proj$", r"re:^model\.layers\.[0-9]+\.mlp\.down_proj$"],
    ]


def test_a_linear_that_differs_between_blocks_is_told_by_name():
    assert written([NAMES[:1], NAMES[3:4]], []) == [[NAMES[0]], [NAMES[3]]]
    assert written([NAMES[:1] + NAMES[3:4]], NAMES[6:7]) == [[NAMES[0], NAMES[3]]]


@pytest.mark.parametrize(
    ("targets", "ignored", "cause"),
    [
        ({"Embedding": 1}, [], "targets: 'Embedding' is neither a linear of this model nor the class Linear"),
        ({"re:(": 1}, [], r"targets: 're:\(' is no regular expression"),
        ({"Linear": 1}, ["re:*"], r"ignore: 're:\*' is no regular expression"),
    ],
)
def test_targets_that_cannot_be_read(targets, ignored, cause):
    with pytest.raises(InputError, match=cause):
        matched(targets, ignored, ALL)
