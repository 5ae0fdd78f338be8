"""Rules: what they match, how they complain, and that text keeps them whole."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.rules import (
    INITIALIZERS,
    LoraRule,
    QtRule,
    QuantizationRule,
    first_match,
    upgrade,
    with_defaults,
)
from fewbit.rules._text import (
    rules_from_json,
    rules_from_list,
    rules_from_yaml,
    rules_to_json,
    rules_to_yaml,
)


def error(call, kind=ValueError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# --- values ---------------------------------------------------------------------------------------


def test_defaults_are_the_familiar_ones():
    rule = QuantizationRule()
    assert (rule.module_path, rule.op_names, rule.weight_qtype, rule.act_qtype) == (
        ".*",
        (),
        None,
        None,
    )
    assert rule.tile_size is rule.act_static_scale is rule.act_calibration_method is None
    assert (rule.weight_calibration_method, rule.act_batch_axes) == ("absmax", (0,))
    qt = QtRule()
    assert qt.bwd_qtype is qt.bwd_weight_grad_tile_size is qt.bwd_stochastic_rounding is None
    assert qt.bwd_calibration_method == "absmax"
    assert (qt.disable_channelwise_axes, qt.channelwise_noise_axes) == (False, (0,))
    assert qt.additional_qt_config is None
    lora = LoraRule(rank=4, alpha=1.0)
    assert lora.dropout == 0.0
    assert lora.lora_b_initializer is jax.nn.initializers.zeros
    assert issubclass(QtRule, QuantizationRule) and issubclass(LoraRule, QuantizationRule)


def test_rules_are_keyword_only_frozen_and_hashable():
    with pytest.raises(TypeError):
        QuantizationRule(".*")
    rule = QtRule(op_names={"einsum", "dot_general"}, additional_qt_config={"tile_size": {0: 2}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.weight_qtype = "int8"
    assert rule.op_names == ("dot_general", "einsum")
    again = QtRule(op_names=["dot_general", "einsum"], additional_qt_config={"tile_size": {0: 2}})
    assert rule == again and hash(rule) == hash(again)
    assert rule != QtRule() and rule != QuantizationRule()


def test_types_are_canonical_however_they_are_spelled():
    spellings = [jnp.int8, "int8", "INT8", jnp.dtype("int8")]
    assert len({QuantizationRule(weight_qtype=spelling) for spelling in spellings}) == 1
    assert QuantizationRule(weight_qtype="fp8").weight_qtype == jnp.float8_e4m3fn
    assert QuantizationRule(weight_qtype="NF4").weight_qtype == "nf4"
    assert QuantizationRule(weight_qtype="int4", scale_dtype=jnp.float16).scale_dtype == "float16"
    assert QuantizationRule(weight_qtype="int4", scale_dtype="bf16").scale_dtype == "bfloat16"
    config = QtRule(additional_qt_config={"dlhs_grad_qtype": jnp.int8}).additional_qt_config
    assert config["dlhs_grad_qtype"] == jnp.dtype("int8")


def test_a_scale_per_element_is_not_one_shared_scale():
    per_element, shared = QuantizationRule(tile_size=1), QuantizationRule(tile_size=1.0)
    assert per_element != shared
    assert type(per_element.tile_size) is int and type(shared.tile_size) is float
    assert QuantizationRule(tile_size={0: 1}) != QuantizationRule(tile_size={0: 1.0})


def test_repr_is_short_and_evaluates_to_the_rule():
    rules = [
        QuantizationRule(),
        QtRule(module_path="a/.*", weight_qtype="fp8", tile_size={0: 128, -1: 0.5}),
        LoraRule(rank=4, alpha=1.0, lora_a_initializer="normal", weight_qtype="mxfp4"),
    ]
    assert repr(rules[0]) == "QuantizationRule()"
    assert [eval(repr(rule)) for rule in rules] == rules


# --- matching -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, path, matched",
    [
        (".*", "", True),
        ("layers/0", "layers/0", True),
        ("layers/0", "layers/01", False),
        ("mlp", "layers/0/mlp", False),
        (r"layers/\d+/(mlp|attn)/.*", "layers/11/attn/q", True),
        ("", "", True),
        ("", "a", False),
    ],
)
def test_the_whole_path_matches_or_nothing(pattern, path, matched):
    assert QuantizationRule(module_path=pattern).matches(path, "dot_general") is matched


def test_op_names_narrow_a_rule():
    rule = QuantizationRule(op_names=("einsum", "gmm"))
    assert rule.matches("x", "gmm") and not rule.matches("x", "dot_general")


def test_the_first_match_decides_and_an_empty_rule_switches_off():
    rules = (QtRule(module_path="head"), QtRule(weight_qtype="int8", op_names=["dot_general"]))
    assert first_match(rules, "head", "dot_general") == (0, rules[0])
    assert rules[0].switched_off and not rules[1].switched_off
    assert first_match(rules, "body", "dot_general") == (1, rules[1])
    assert first_match(rules, "body", "einsum") == (None, None)


def test_upgrade_keeps_the_fields():
    rule = QuantizationRule(module_path="a", weight_qtype="int4", tile_size=32)
    qt = upgrade(rule, QtRule)
    assert type(qt) is QtRule and qt.tile_size == 32 and upgrade(qt, QtRule) is qt
    assert upgrade(rule, LoraRule, rank=2, alpha=4.0).rank == 2
    assert upgrade(qt, QuantizationRule) is qt
    assert "cannot become a LoraRule" in error(lambda: upgrade(qt, LoraRule), TypeError)


def test_defaults_are_decided_by_the_mode():
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    ptq = with_defaults(rule)
    odml = with_defaults(rule, act_static_scale=True, act_calibration_method="minmax")
    assert (ptq.act_static_scale, ptq.act_calibration_method) == (False, "absmax")
    assert (odml.act_static_scale, odml.act_calibration_method) == (True, "minmax")
    chosen = QuantizationRule(act_qtype="int8", act_static_scale=True)
    assert with_defaults(chosen).act_static_scale is True
    weight_only = QuantizationRule(weight_qtype="int8")
    assert with_defaults(weight_only) is weight_only


# --- tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, tile", [("mxfp8", 32), ("mxfp4", 32), ("mxfp8_16", 16), ("nvfp4", 16)]
)
def test_block_formats_bring_their_tile_and_insist_on_it(name, tile):
    assert QuantizationRule(weight_qtype=name).tile_size == tile
    assert QuantizationRule(weight_qtype=name, tile_size=tile).tile_size == tile
    assert QtRule(bwd_qtype=name).bwd_weight_grad_tile_size == tile
    for other in (8, 0.5):
        text = error(lambda other=other: QuantizationRule(weight_qtype=name, tile_size=other))
        assert f"Format {name} requires a tile size of {tile}, but tile_size is {other}" in text
        assert f"write tile_size={tile}" in text


def test_formats_with_different_tiles_do_not_share_a_rule():
    text = error(lambda: QuantizationRule(weight_qtype="nvfp4", act_qtype="mxfp8"))
    assert "nvfp4 needs tiles of 16 and mxfp8 needs tiles of 32" in text


@pytest.mark.parametrize("tile", [0, -1, 1.5, 0.0, True, "32", {}, {"a": 2}, {0: 0}])
def test_impossible_tiles_are_refused(tile):
    error(lambda: QuantizationRule(weight_qtype="int8", tile_size=tile), (ValueError, TypeError))


def test_a_whole_number_written_as_float_gets_its_fix():
    assert "Write tile_size=128" in error(lambda: QuantizationRule(tile_size=128.0))


# --- sentences ------------------------------------------------------------------------------------


def test_a_bad_regex_says_where_and_how_to_write_it():
    text = error(lambda: QuantizationRule(module_path="*mlp"))
    assert "nothing to repeat at position 0" in text
    assert "module_path='*mlp'" in text and "\n    *mlp\n    ^\n" in text and "'.*mlp'" in text
    assert "at position 4" in error(lambda: QtRule(module_path="mlp/(up"))


@pytest.mark.parametrize(
    "fields, kind, sentences",
    [
        ({"module_path": None}, TypeError, ["module_path must be a string", "'.*'"]),
        ({"module_path": re.compile("a")}, TypeError, ["compiled pattern", "'a'"]),
        ({"op_names": "einsum"}, TypeError, ["is one string", "Write op_names=('einsum',)"]),
        ({"op_names": [jax.lax.dot_general]}, TypeError, ["not an op's name", "'dot_general'"]),
        ({"op_names": 3}, TypeError, ["collection of op names"]),
        (
            {"weight_qtype": "fp6"},
            ValueError,
            ["data type 'fp6' not understood", "module_path='.*'", "weight_qtype"],
        ),
        ({"act_qtype": jnp.float32}, ValueError, ["Cannot use float32 as qtype.", "act_qtype"]),
        ({"weight_qtype": "none"}, ValueError, ["is a string", "weight_qtype=None"]),
        (
            {"act_static_scale": True},
            ValueError,
            ["Invalid rule: act_static_scale is set to True but act_qtype is None. Please either"],
        ),
        ({"act_static_scale": False}, ValueError, ["act_static_scale is set to False but"]),
        ({"act_qtype": "int8", "act_static_scale": 1}, TypeError, ["True, False or None"]),
        ({"weight_calibration_method": "rms"}, ValueError, ["A scale factor is required for RMS"]),
        ({"weight_calibration_method": "absmx"}, ValueError, ["Unsupported calibration: absmx"]),
        ({"weight_calibration_method": None}, TypeError, ["Write 'absmax'"]),
        ({"act_calibration_method": 3}, TypeError, ["must be a string"]),
        (
            {"weight_qtype": "nf4", "weight_calibration_method": "minmax"},
            ValueError,
            ["doesn't support asymmetric quantization", "weight_calibration_method='minmax'"],
        ),
        ({"act_batch_axes": 0}, TypeError, ["Write act_batch_axes=(0,)"]),
        ({"act_batch_axes": ("0",)}, TypeError, ["integer axes"]),
        ({"scale_dtype": "int8"}, ValueError, ["cannot hold a scale", "float16"]),
        ({"scale_dtype": "flaot16"}, ValueError, ["Did you mean 'float16'?"]),
        (
            {"weight_qtype": "mxfp4", "scale_dtype": "float16"},
            ValueError,
            ["mxfp4 stores its scales as float8_e8m0fnu", "Leave scale_dtype out"],
        ),
    ],
)
def test_wrong_fields_are_named_and_mended(fields, kind, sentences):
    text = error(lambda: QuantizationRule(**fields), kind)
    for sentence in sentences:
        assert sentence in text


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"bwd_stochastic_rounding": "unifrom"}, "Did you mean 'uniform'?"),
        ({"bwd_qtype": "in8"}, "bwd_qtype: data type 'in8' not understood"),
        ({"bwd_qtype": "fp8", "bwd_calibration_method": "minmax"}, "asymmetric"),
        ({"bwd_weight_grad_tile_size": 2.0}, "Write bwd_weight_grad_tile_size=2"),
        ({"disable_channelwise_axes": None}, "True or False"),
        ({"channelwise_noise_axes": 1}, "Write channelwise_noise_axes=(1,)"),
        ({"additional_qt_config": [1]}, "mapping"),
    ],
)
def test_wrong_training_fields(fields, sentence):
    assert sentence in error(lambda: QtRule(**fields), (ValueError, TypeError))


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"rank": 0}, "rank must be a positive integer"),
        ({"rank": 1.5}, "rank must be a positive integer"),
        ({"alpha": float("nan")}, "alpha must be a finite number"),
        ({"dropout": 1.0}, "dropout must be a share in [0, 1)"),
        ({"lora_a_initializer": "zero"}, "Did you mean 'zeros'?"),
        ({"lora_b_initializer": 0}, "must be a function of (key, shape, dtype)"),
    ],
)
def test_wrong_adapter_fields(fields, sentence):
    values = {"rank": 4, "alpha": 1.0, **fields}
    assert sentence in error(lambda: LoraRule(**values), (ValueError, TypeError))


# --- text -----------------------------------------------------------------------------------------

_QTYPES = st.sampled_from([None, "int8", "int4", "int3", "nf4", "fp8", "fp8_e5m2", "mxfp4"])
_PATHS = st.one_of(
    st.sampled_from([".*", "layers/[0-9]+/mlp", "a|b", "yes", "1e3", "~", "null", "- x: y"]),
    st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=8).map(re.escape),
)
_TILES = st.one_of(
    st.none(),
    st.integers(1, 512),
    st.floats(0, 1, exclude_min=True, allow_subnormal=False),
    st.dictionaries(st.integers(-4, 4), st.sampled_from([1, 1.0, 128, 0.25]), min_size=1),
)


@st.composite
def rules(draw):
    weight, act = draw(_QTYPES), draw(_QTYPES)
    fields = {
        "module_path": draw(_PATHS),
        "op_names": draw(st.lists(st.sampled_from(["dot_general", "einsum", "gmm"]))),
        "weight_qtype": weight,
        "act_qtype": act,
        "tile_size": None if "mxfp4" in (weight, act) else draw(_TILES),
        "act_static_scale": draw(st.sampled_from([None, True, False])) if act else None,
        "weight_calibration_method": draw(st.sampled_from(["absmax", "rms,7", "absmax,0.9"])),
        "act_batch_axes": draw(st.lists(st.integers(-3, 3))),
        "scale_dtype": None if weight == "mxfp4" else draw(st.sampled_from([None, "float16"])),
    }
    cls = draw(st.sampled_from([QuantizationRule, QtRule, LoraRule]))
    if cls is QtRule:
        if act and isinstance(fields["tile_size"], dict):  # refused: tests/qarray/test_odd_tiles.py
            fields["tile_size"] = None
        fields["bwd_qtype"] = draw(st.sampled_from([None, "int8", "fp8_e5m2"]))
        fields["bwd_weight_grad_tile_size"] = draw(st.sampled_from([None, 1, 1.0, 1 / 3]))
        fields["additional_qt_config"] = draw(
            st.sampled_from(
                [
                    None,
                    {"dlhs_grad_qtype": "nf4", "drhs_tile_size": 1 / 4, "dlhs_tile_size": None},
                    {"use_original_residuals": True, "lhs_calibration_method": "rms,3"},
                ]
            )
        )
    if cls is LoraRule:
        finite = st.floats(allow_nan=False, allow_infinity=False)
        fields |= {"rank": draw(st.integers(1, 64)), "alpha": draw(finite)}
        fields["lora_a_initializer"] = draw(st.sampled_from(sorted(INITIALIZERS)))
    return cls(**fields)


@settings(max_examples=60, deadline=None)
@given(st.lists(rules(), max_size=3))
def test_text_keeps_rules_exactly(given_rules):
    expected = tuple(given_rules)
    assert rules_from_json(rules_to_json(expected)) == expected
    assert rules_from_yaml(rules_to_yaml(expected)) == expected


def test_yaml_as_people_write_it(tmp_path):
    text = """
    rules:
      - module_path: head          # stays float
      - {kind: qt, weight_qtype: int8, act_qtype: int8, op_names: [dot_general]}
      - {kind: lora, weight_qtype: nf4, tile_size: 64, rank: 8, alpha: 16}
    """
    read = rules_from_yaml(text)
    assert [type(rule) for rule in read] == [QuantizationRule, QtRule, LoraRule]
    assert read[0].switched_off
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    assert rules_from_yaml(path) == rules_from_yaml(str(path)) == read
    (tmp_path / "rules.json").write_text(rules_to_json(read))
    assert rules_from_json(tmp_path / "rules.json") == read


@pytest.mark.parametrize(
    "document, sentence",
    [
        ([{"weight_qtyp": "int8"}], "rule 0: unknown field 'weight_qtyp' in a QuantizationRule. "
         "Did you mean 'weight_qtype'?"),
        ([{}, {"bwd_qtype": "int8"}], "rule 1: 'bwd_qtype' is a field of QtRule, not of "
         "QuantizationRule. Add `kind: qt`"),
        ([{"kind": "lroa"}], "unknown kind 'lroa'. Did you mean 'lora'?"),
        ([{"kind": "lora", "rank": 2}], "a LoraRule needs alpha"),
        ([{"module_path": "*"}], "rule 0: QuantizationRule: module_path='*' is not a regular"),
        ({"rule": []}, "unknown key 'rule' beside the rules. Did you mean 'rules'?"),
        ({"rules": None}, "expected a list of rules, got NoneType"),
        (["int8"], "rule 0: expected a mapping of fields, got str 'int8'"),
    ],
)  # fmt: skip
def test_documents_that_are_not_rules(document, sentence):
    assert sentence in error(lambda: rules_from_list(document))


def test_text_that_does_not_parse():
    assert "line 1, column 2" in error(lambda: rules_from_json("[}"))
    assert "NaN is not a value JSON has" in error(lambda: rules_from_json('[{"tile_size": NaN}]'))
    assert "'a' is given twice" in error(lambda: rules_from_json('[{"a": 1, "a": 2}]'))
    assert "not YAML" in error(lambda: rules_from_yaml("- ["))
    twice = "- weight_qtype: int8\n  weight_qtype: int4"
    assert "'weight_qtype' is given twice (line 2)" in error(lambda: rules_from_yaml(twice))


def test_a_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "rules.yaml").write_text("[]")
    text = error(lambda: rules_from_yaml(tmp_path / "rule.yaml"), FileNotFoundError)
    assert "Did you mean 'rules.yaml'?" in text


def test_what_cannot_be_saved_says_so():
    custom = LoraRule(rank=1, alpha=1.0, lora_a_initializer=jax.nn.initializers.normal(3.0))
    assert "lora_a_initializer is" in error(lambda: rules_to_json([custom]), TypeError)
    assert "Write [QuantizationRule()]" in error(
        lambda: rules_to_json(QuantizationRule()), TypeError
    )

    @dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
    class OwnRule(QuantizationRule):
        strength: float = 0.5

    assert "no name to be saved under" in error(lambda: rules_to_json([OwnRule()]), TypeError)


def test_own_rule_classes_travel_by_their_kind():
    @dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
    class StrongRule(QuantizationRule):
        kind = "strong"
        strength: float = 0.5

    rule = StrongRule(weight_qtype="int8", strength=0.75)
    assert rules_from_yaml(rules_to_yaml([rule])) == (rule,)
