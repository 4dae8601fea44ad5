"""`transform_config`: compressed-tensors reads what is written, and what is not understood is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compress_llm.formats.errors import InputError
from compress_llm.formats.quantization_config import build, parse
from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.formats.transform_config import build_transforms, parse_transforms

QKV = [f"model.layers.{n}.self_attn.{part}_proj" for n in (0, 1) for part in "qkv"]
DOWN = [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)]
HEAD = "lm_head"


def turned(block: int | None, name: str = "W4A16") -> Scheme:
    return replace(SCHEMES[name], rotation=block)


MIXTURES: dict[str, dict[str, Scheme]] = {
    "one": dict.fromkeys([*QKV, *DOWN], turned(64)),
    "two": {**dict.fromkeys(QKV, turned(64)), **dict.fromkeys(DOWN, turned(32))},
    "some": {**dict.fromkeys(QKV, turned(64)), **dict.fromkeys(DOWN, turned(None))},
    "schemes": {**dict.fromkeys(QKV, turned(128)), **dict.fromkeys(DOWN, turned(128, "W8A8"))},
    "none": dict.fromkeys([*QKV, *DOWN], turned(None)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_is_written_is_read_again(name: str) -> None:
    schemes = MIXTURES[name]
    config = build(schemes, [HEAD])
    assert parse(config, [*schemes, HEAD]) == schemes
    groups = config["config_groups"]
    assert isinstance(groups, dict) and len(groups) == len({replace(row, rotation=None) for row in schemes.values()})


def test_compressed_tensors_finds_the_same_linears() -> None:
    transform = pytest.importorskip("compressed_tensors.transform")
    match = pytest.importorskip("compressed_tensors.utils.match")
    import torch

    linear = torch.nn.Linear(2, 2)
    for schemes in MIXTURES.values():
        written = build_transforms(schemes, [HEAD])
        groups = transform.TransformConfig.model_validate(written or {"config_groups": {}}).config_groups
        found = {}
        for group in groups.values():
            (where,) = group.apply
            assert (group.type, where.location, group.randomize) == ("hadamard", "input", False)
            for name in [*schemes, HEAD]:
                if match.is_match(name, linear, where.targets, where.ignore):
                    assert name not in found
                    found[name] = group.head_dim
        assert found == {name: row.rotation for name, row in schemes.items() if row.rotation}


def group(**changes: Any) -> dict[str, Any]:
    where = {"targets": ["Linear"], "location": "input", "ignore": [HEAD], **changes.pop("where", {})}
    return {"config_groups": {"u": {"type": "hadamard", "head_dim": 32, "apply": [where], **changes}}}


def test_offline_parts_and_defaults_of_other_writers() -> None:
    config = group()
    config["config_groups"]["u"]["apply"].append({"targets": "Linear", "location": "weight_input"})
    assert parse_transforms(config, [*DOWN, HEAD]) == dict.fromkeys(DOWN, 32)
    for nothing in (None, {}, {"config_groups": {}}):
        assert parse_transforms(nothing, DOWN) == {}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (group(type="random-hadamard"), "another transform"),
        (group(randomize=True), "another transform"),
        (group(head_dim=None), "head_dim None"),
        (group(head_dim=24), "head_dim 24"),
        (group(precision="torch.bfloat16"), "bfloat16"),
        (group(where={"location": "output"}), "location 'output'"),
        (group(where={"targets": 3}), "no list of names"),
        (group(apply=None), "no places"),
        ({"config_groups": [1]}, "not a mapping"),
        ({"config_groups": {**group()["config_groups"], "v": group()["config_groups"]["u"]}}, "a second time"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match="transform_config") as caught:
        parse_transforms(config, [*DOWN, HEAD])
    assert words in str(caught.value)


def test_a_rotation_of_a_plain_linear_is_refused() -> None:
    config = build(dict.fromkeys(DOWN, turned(None)), [HEAD])
    config["transform_config"] = group(where={"ignore": []})
    with pytest.raises(InputError, match="lm_head, which is stored plain"):
        parse(config, [*DOWN, HEAD])
