"""`quantization_config` both ways: accepted by compressed-tensors, and read back as the same schemes."""

import json
from copy import deepcopy

import pytest
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.errors import InputError
from compress_llm.formats.quantization_config import build, parse
from compress_llm.formats.scheme import SCHEMES, Scheme

LINEARS = [f"model.layers.{block}.{part}" for block in range(3) for part in ("self_attn.q_proj", "mlp.up_proj")]
NAMES = [*LINEARS, "lm_head"]
W4 = SCHEMES["W4A16"].with_group(64)


STOCK = [scheme for scheme in SCHEMES.values() if not scheme.packing.startswith("compress-")]
OWN = [scheme for scheme in SCHEMES.values() if scheme not in STOCK]


@st.composite
def any_scheme(draw: st.DrawFn) -> Scheme:
    scheme = draw(st.sampled_from(STOCK))
    if scheme.packing == "pack-quantized":
        scheme = scheme.with_symmetry(draw(st.booleans()))
    return scheme.with_group(draw(st.sampled_from([32, 24, "channel"]))) if scheme.groupable else scheme


@settings(deadline=None, max_examples=80)
@given(
    schemes=st.dictionaries(st.sampled_from(NAMES), any_scheme(), min_size=1),
    actorder=st.sampled_from([None, "static"]),
)
def test_what_is_built_is_accepted_and_read_back(schemes, actorder):
    ignored = [name for name in NAMES if name not in schemes]
    config = json.loads(json.dumps(build(schemes, ignored, actorder)))
    assert parse(config, NAMES) == schemes
    accepted = QuantizationConfig.model_validate(config)
    assert accepted.config_groups.keys() == config["config_groups"].keys()
    assert len(config["config_groups"]) == len(set(schemes.values()))
    assert CompressionFormat(config["format"])
    if len(set(schemes.values())) > 1:
        assert not any("Linear" in group["targets"] for group in config["config_groups"].values())
    rewritten = {**json.loads(accepted.model_dump_json()), "quant_method": "compressed-tensors"}
    assert parse(rewritten, NAMES) == schemes


@pytest.mark.parametrize("own", OWN, ids=lambda scheme: scheme.name)
def test_layouts_of_our_own_are_read_back_also_beside_stock_ones(own):
    grouped = own.with_group(32) if own.groupable else own.with_sparsity(0.6, None)
    mixed = {LINEARS[0]: grouped, LINEARS[1]: W4, "lm_head": own.with_group("channel")}
    for schemes in (dict.fromkeys(LINEARS, own), mixed):
        ignored = [name for name in NAMES if name not in schemes]
        assert parse(json.loads(json.dumps(build(schemes, ignored))), NAMES) == schemes


@pytest.mark.parametrize(("ratio", "pattern"), [(0.5, None), (0.65, None), (None, "2:4"), (None, "4:8")])
@pytest.mark.parametrize("name", ["SPARSE50", "SPARSE50_W4A16"])
def test_ratio_pattern_and_layout_are_kept(name, ratio, pattern):
    scheme = SCHEMES[name].with_sparsity(ratio, pattern)
    for layout in (None, *scheme.layouts):
        stored = dict.fromkeys(LINEARS, scheme.with_layout(layout))
        assert parse(json.loads(json.dumps(build(stored, []))), LINEARS) == stored


@pytest.mark.parametrize("value", [{"ratio": 0.9, "pattern": "unstructured"}, {"ratio": 0.5, "pattern": "3:5"}, "half"])
def test_a_sparsity_that_no_scheme_has_is_refused(value):
    config = deepcopy(build(dict.fromkeys(LINEARS, SCHEMES["SPARSE50"]), []))
    config["config_groups"]["group_0"]["weights"]["sparsity"] = value
    with pytest.raises(InputError, match="no scheme stored as compress-three-layer"):
        parse(config, LINEARS)


def test_one_scheme_in_full():
    config = build(dict.fromkeys(LINEARS, W4), ["lm_head"], "static")
    assert config == {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 64,
                    "dynamic": False,
                    "actorder": "static",
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    }


def test_zero_points_and_activations_are_told():
    group = build({"lm_head": SCHEMES["W4A16_ASYM"]}, [])["config_groups"]["group_0"]
    assert (group["weights"]["symmetric"], group["weights"]["zp_dtype"]) == (False, "torch.int8")
    for name, strategy, dynamic in (("W8A8", "token", True), ("W8A8_STATIC", "tensor", False)):
        group = build({"lm_head": SCHEMES[name]}, [])["config_groups"]["group_0"]
        inputs = group["input_activations"]
        assert (inputs["num_bits"], inputs["symmetric"], inputs["strategy"], inputs["dynamic"]) == (
            8,
            True,
            strategy,
            dynamic,
        )


def test_activation_order_is_told_of_groups_only():
    config = build({LINEARS[0]: W4, LINEARS[1]: SCHEMES["W8A16"]}, [], "static")
    orders = [group["weights"].get("actorder") for group in config["config_groups"].values()]
    assert orders == ["static", None]


def test_the_format_is_mixed_only_where_formats_differ():
    one_format = build({LINEARS[0]: W4, LINEARS[1]: SCHEMES["W8A16"]}, [])
    two_formats = build({LINEARS[0]: W4, LINEARS[1]: SCHEMES["W8A8"]}, [])
    assert (one_format["format"], two_formats["format"]) == ("pack-quantized", "mixed-precision")


def test_building_refuses_nothing_and_contradictions():
    with pytest.raises(InputError, match="leaves nothing to quantise"):
        build({}, ["lm_head"])
    with pytest.raises(InputError, match="lm_head: is both quantised and ignored"):
        build({"lm_head": W4}, ["lm_head"])


def test_reading_the_dialect_of_other_writers():
    """Defaults left out, strategies implied, upper case, the format at the top only, weight for static."""
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "sparsity_config": {"format": "dense", "ignore": []},
        "transform_config": {"config_groups": {}},
        "ignore": None,
        "config_groups": {
            "a": {"targets": ["re:.*q_proj"], "weights": {"num_bits": 4, "group_size": 64, "actorder": "weight"}},
            "b": {"targets": ["Linear"], "weights": {"type": "INT", "group_size": -1, "observer": "mse"}},
        },
    }
    channel = SCHEMES["W8A16"]
    expected = {name: W4 if "q_proj" in name else channel for name in NAMES}
    assert parse(config, NAMES) == expected
    accepted = QuantizationConfig.model_validate(config)
    assert accepted.config_groups["a"].weights.strategy == "group"
    assert accepted.config_groups["b"].weights.strategy == "channel"


def changed(path: str, value: object) -> dict:
    """The configuration of one W8A8 group with the value at the dotted path replaced."""
    config = deepcopy(build(dict.fromkeys(LINEARS, SCHEMES["W8A8"]), ["lm_head"]))
    place = config
    *parents, last = path.split("/")
    for key in parents:
        place = place[key]
    place[last] = value
    return config


GROUP = "config_groups/group_0"


@pytest.mark.parametrize(
    ("path", "value", "cause"),
    [
        ("quant_method", "awq", "quant_method: 'awq' checkpoints are not read"),
        ("quant_method", None, "quant_method: 'None' checkpoints are not read"),
        ("quantization_status", "frozen", "quantization_status: is 'frozen'"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme: asks for something that is not read"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config: asks for"),
        ("transform_config", {"config_groups": {"u": {"type": "random-matrix"}}}, "u: asks for another transform"),
        ("moe_sparsity_config", {"layers": [1]}, "moe_sparsity_config: asks for"),
        ("config_groups", ["Linear"], "config_groups: is not a mapping"),
        ("ignore", "lm_head", "ignore: is not a list of names"),
        (GROUP, ["Linear"], "config_groups.group_0: is not a mapping"),
        (f"{GROUP}/targets", None, "config_groups.group_0.targets: is not a list of names"),
        (f"{GROUP}/targets", [1], "config_groups.group_0.targets: is not a list of names"),
        (f"{GROUP}/format", "int-quantised", "format: 'int-quantised' is not read; did you mean 'int-quantized'"),
        (f"{GROUP}/format", "marlin-24", "format: 'marlin-24' is not read"),
        (f"{GROUP}/weights", None, "group_0.weights: is not a mapping"),
        (f"{GROUP}/weights/actorder", "group", "actorder: 'group' stores columns in another order"),
        (f"{GROUP}/weights/num_bits", 3, "group_0: no scheme stored as int-quantized has weights"),
        (f"{GROUP}/weights/type", "float", "no scheme stored as int-quantized"),
        (f"{GROUP}/weights/symmetric", False, "no scheme stored as int-quantized"),
        (f"{GROUP}/weights/strategy", "block", "no scheme stored as int-quantized"),
        (f"{GROUP}/weights/group_size", 64, "no scheme stored as int-quantized"),
        (f"{GROUP}/weights/group_size", "64", "no scheme stored as int-quantized"),
        (f"{GROUP}/weights/dynamic", True, "no scheme stored as int-quantized"),
        (f"{GROUP}/input_activations", None, "no scheme stored as int-quantized"),
        (f"{GROUP}/input_activations/num_bits", 4, "no scheme stored as int-quantized"),
        (f"{GROUP}/input_activations/strategy", "tensor", "no scheme stored as int-quantized"),
        (f"{GROUP}/output_activations", {"num_bits": 8}, "output_activations: is not read"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(path, value, cause):
    with pytest.raises(InputError) as caught:
        parse(changed(path, value), NAMES)
    assert str(caught.value).startswith("quantization_config ")
    assert cause in str(caught.value)


def test_an_activation_scheme_does_not_pass_for_weight_only():
    config = build(dict.fromkeys(LINEARS, SCHEMES["W8A16"]), ["lm_head"])
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "strategy": "token", "dynamic": True}
    with pytest.raises(InputError, match="no scheme stored as pack-quantized"):
        parse(config, NAMES)


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() & PRESET_SCHEMES.keys() - {"W4A16_ASYM", "W8A16"}))
def test_presets_are_told_as_compressed_tensors_tells_them(name):
    """Theirs of W8A16 is another scheme, and zero points have a dtype of their own in ours."""
    theirs = json.loads(preset_name_to_scheme(name, ["Linear"]).model_dump_json())
    ours = json.loads(json.dumps(build({"lm_head": SCHEMES[name]}, [])["config_groups"]["group_0"]))
    assert ours.pop("format") == SCHEMES[name].packing
    theirs.pop("format")
    assert ours == theirs


def test_the_scale_rule_is_told_where_it_is_not_the_plain_one():
    schemes = {LINEARS[0]: SCHEMES["NVFP4A16"], LINEARS[1]: W4}
    config = build(schemes, [], scale_rules={"NVFP4A16": "four-over-six", "W4A16": "minmax"})
    weights = [group["weights"] for group in config["config_groups"].values()]
    assert [group.get("observer") for group in weights] == ["four-over-six", None]
    assert parse(json.loads(json.dumps(config)), NAMES[:2]) == schemes
    assert QuantizationConfig.model_validate(config)


@pytest.mark.parametrize("rule", ["four-over-six", "mse"])
def test_the_rule_of_inputs_is_told_and_read(rule):
    schemes = {LINEARS[0]: SCHEMES["NVFP4"].with_input_rule(rule), LINEARS[1]: SCHEMES["NVFP4"]}
    config = json.loads(json.dumps(build(schemes, [])))
    assert parse(config, NAMES[:2]) == schemes
    assert QuantizationConfig.model_validate(config)
    group = next(iter(config["config_groups"].values()))
    group["input_activations"]["observer_kwargs"] = 7
    with pytest.raises(InputError, match=r"input_activations\.observer_kwargs: is not a mapping"):
        parse(config, NAMES[:2])
    group["input_activations"]["observer_kwargs"] = {"scale_rule": "median"}
    with pytest.raises(InputError, match=r"input_activations scale_rule median: no rule has this name"):
        parse(config, NAMES[:2])


def test_writers_that_leave_the_dtype_of_scales_out_are_understood_and_wrong_ones_refused():
    for name in ("NVFP4", "MXFP4", "MXFP8"):
        config = json.loads(json.dumps(build({"lm_head": SCHEMES[name]}, [])))
        weights = config["config_groups"]["group_0"]["weights"]
        stored = weights.pop("scale_dtype")
        assert parse(config, ["lm_head"]) == {"lm_head": SCHEMES[name]}
        weights["scale_dtype"] = "torch.uint8" if stored != "torch.uint8" else "torch.float8_e4m3fn"
        with pytest.raises(InputError, match="no scheme stored as"):
            parse(config, ["lm_head"])
