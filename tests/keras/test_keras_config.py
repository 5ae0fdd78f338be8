"""Keras configs: what they accept, and what they refuse in which words."""

import copy
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras_cases import (
    BOTH,
    FLAGS,
    LAYERS,
    Conv2D,
    Dense,
    MyDense,
    error,
    says,
)

import fewbit
from fewbit.keras import (
    DynamicQuantConfig,
    JaxBaseConfig,
    JaxComposableConfig,
    StaticQuantConfig,
    get_default_dynamic_config,
    get_default_static_config,
)
from fewbit.keras.config._choose import choose
from fewbit.numerics import FORMATS

MIXED = "Mixed quantization with floating-point and integer dtypes is not supported."


# --- fields ---------------------------------------------------------------------------------------


@BOTH
def test_defaults_are_the_known_ones(config_class):
    config = config_class()
    assert config.get_params_dict() == {
        "weight_dtype": "fp8_e4m3",
        "activation_dtype": "fp8_e4m3",
        "const_scale": False,
        "const_weight": False,
        "weight_scale_granularity": "per_tensor",
        "dot_product_attention_enable": False,
        "group_size": None,
        "weight_calibration_method": "absmax",
        "act_calibration_method": None,
        "act_static_reduction": None,
        "emulate": False,
        "quantize_attention": None,
        "quantize_rotary": False,
        "quantize_embeddings": True,
        "scale_dtype": None,
        "strict": True,
    }
    assert list(config.get_params_dict()) == config_class.params_list
    assert (config.white_list, config.exclude_list) == ("*", None)


def test_names_and_default_functions():
    assert get_default_static_config() == StaticQuantConfig()
    assert get_default_dynamic_config() == DynamicQuantConfig()
    assert StaticQuantConfig().name == StaticQuantConfig.name == "static_quant"
    assert DynamicQuantConfig.name == "dynamic_quant"
    assert JaxComposableConfig.name == "composable_config"
    assert StaticQuantConfig() != DynamicQuantConfig()
    for config_class in (StaticQuantConfig, DynamicQuantConfig, JaxComposableConfig):
        assert issubclass(config_class, JaxBaseConfig)


def test_positional_arguments_are_in_the_known_order():
    config = StaticQuantConfig("int8", "int8", True, True, "per_channel", True, ["a"], ["b"])
    assert config == StaticQuantConfig(
        weight_dtype="int8",
        activation_dtype="int8",
        const_scale=True,
        const_weight=True,
        weight_scale_granularity="per_channel",
        dot_product_attention_enable=True,
        white_list=["a"],
        exclude_list=["b"],
    )


# The last column is Dynamic's where it differs from Static's.
@pytest.mark.parametrize(
    "weight, static, dynamic, granularity",
    [
        ("int8", "int8", "int8", "per_tensor"),
        ("fp8", "fp8_e4m3", "fp8_e4m3", "per_tensor"),
        ("fp8_e5m2", "fp8_e4m3", "fp8_e4m3", "per_tensor"),
        ("int7", "int8", None, "per_channel"),
        ("int4", "int8", None, "per_channel"),
        ("int2", "int8", None, "per_channel"),
        ("nf4", "int8", None, "per_channel"),
        ("mxfp4", "int8", None, "per_channel"),
        ("mxfp8", "int8", None, "per_channel"),
        ("nvfp4", "int8", None, "per_channel"),
    ],
)
def test_what_is_not_given_follows_the_weights(weight, static, dynamic, granularity):
    for config, expected in (
        (StaticQuantConfig(weight_dtype=weight), static),
        (DynamicQuantConfig(weight_dtype=weight), dynamic),
    ):
        assert (config.weight_dtype, config.activation_dtype) == (weight, expected)
        assert config.weight_scale_granularity == granularity
        # What followed silently must be allowed when it is written out.
        assert type(config)(weight, expected, weight_scale_granularity=granularity) == config


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"uint4", "uint8"}))
def test_every_format_of_fewbit_is_accepted(name):
    assert choose(DynamicQuantConfig(name), LAYERS[2:3])["net/dense"].quantized
    assert choose(StaticQuantConfig(name), LAYERS[2:3])["net/dense"].kind == "static"


def test_fp8_is_the_variant_without_infinities():
    for spelling in ("fp8", "fp8_e4m3", "FP8", "float8_e4m3fn", jnp.float8_e4m3fn):
        config = DynamicQuantConfig(spelling)
        assert choose(config, LAYERS[2:3])["net/dense"].rule.weight_qtype == jnp.float8_e4m3fn
        assert config == DynamicQuantConfig()
    rule = choose(DynamicQuantConfig("float8_e4m3"), LAYERS[2:3])["net/dense"].rule
    assert rule.weight_qtype == jnp.float8_e4m3


def test_types_as_objects_are_held_by_name():
    assert StaticQuantConfig(jnp.int8, jnp.dtype("int8")).to_dict()["config"]["weight_dtype"] == (
        "int8"
    )


@BOTH
def test_integers_do_not_go_with_floats(config_class):
    name = config_class.__name__
    says(
        lambda: config_class("int8", "fp8_e4m3"),
        MIXED,
        f"{name} has weight_dtype='int8' and activation_dtype='fp8_e4m3'",
        "leave activation_dtype out",
        "write activation_dtype='int8', or activation_dtype=None",
    )
    says(lambda: config_class("fp8_e5m2", "int8"), MIXED, "write activation_dtype='fp8_e4m3'")
    assert config_class("fp8_e4m3", "fp8_e5m2").activation_dtype == "fp8_e5m2"
    assert config_class("int4", "int8").activation_dtype == "int8"


@BOTH
@pytest.mark.parametrize(
    "value, sentences",
    [
        ("int44", ("weight_dtype='int44' is not a quantized type.", "Did you mean 'int4'?")),
        ("fp8_e4m4", ("Did you mean 'fp8_e4m3'?", "Types are int8, int7", "fewbit's own names")),
        (3, ("weight_dtype=3 is not a quantized type.",)),
        ("fp32", ("weight_dtype='fp32' would quantize nothing.", "exclude_list=[...]")),
        (jnp.float32, ("would quantize nothing",)),
        (None, ("weight_dtype is None", "Write weight_dtype='int8'")),
    ],
)
def test_a_bad_type(config_class, value, sentences):
    says(lambda: config_class(weight_dtype=value), config_class.__name__, *sentences)


def test_a_bad_type_of_activations():
    says(lambda: StaticQuantConfig("int8", "in8"), "activation_dtype='in8'", "Did you mean 'int8'?")
    says(lambda: StaticQuantConfig("int8", "none"), "for weight-only write activation_dtype=None")
    says(
        lambda: StaticQuantConfig(["int8", "int4"]),
        "weight_dtype is a list of str objects",
        "Make one config for each type",
        kind=TypeError,
    )


def test_weight_only():
    for config in (StaticQuantConfig("int8", None), DynamicQuantConfig("fp8", None)):
        assert config.activation_dtype is None
        choice = choose(config, LAYERS[2:3])["net/dense"]
        assert choice.kind == "weight_only" and choice.rule.act_qtype is None
    says(
        lambda: DynamicQuantConfig("int4", act_calibration_method="minmax"),
        "act_calibration_method='minmax' is for quantized activations",
        "activation_dtype is None (weight-only)",
    )
    says(
        lambda: DynamicQuantConfig("int4", quantize_attention=True),
        "quantize_attention=True is about products of activations",
        "write activation_dtype='int8'",
    )


@BOTH
@pytest.mark.parametrize("value", ["per_group", "per-channel", "", None, 3])
def test_a_bad_granularity(config_class, value):
    says(
        lambda: config_class(weight_scale_granularity=value),
        f"{config_class.__name__}: weight_scale_granularity={value!r} is unknown.",
        "It is 'per_tensor' or 'per_channel'; for a scale per group of weights write group_size=32",
    )


def test_the_nearest_granularity():
    says(lambda: StaticQuantConfig(weight_scale_granularity="per_chanel"), "mean 'per_channel'?")


def test_groups():
    config = DynamicQuantConfig("int4", group_size=32)
    assert config.weight_scale_granularity == "per_channel"
    choice = choose(config, LAYERS[2:3])["net/dense"]
    assert (choice.granularity, choice.rule.tile_size) == ("per_group", 32)
    assert choose(DynamicQuantConfig("mxfp4"), LAYERS[2:3])["net/dense"].granularity == "per_group"
    assert type(DynamicQuantConfig("int4", group_size=np.int64(32)).group_size) is int
    for wrong in (0, -1, 2.0, True, "32"):
        says(lambda wrong=wrong: DynamicQuantConfig("int4", group_size=wrong), "positive integer")
    says(
        lambda: DynamicQuantConfig("int4", weight_scale_granularity="per_tensor", group_size=32),
        "'per_tensor' asks for one scale, but group_size=32 asks for one per group",
        "or leave group_size out",
    )
    says(
        lambda: DynamicQuantConfig("mxfp4", weight_scale_granularity="per_tensor"),
        "the format mxfp4 asks for one per group",
    )
    says(
        lambda: DynamicQuantConfig("mxfp4", group_size=64),
        "DynamicQuantConfig: Format mxfp4 requires a tile size of 32, but group_size is 64",
    )


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_a_truth_value(flag):
    for wrong in ("yes", 1):
        says(
            lambda wrong=wrong: StaticQuantConfig(**{flag: wrong}),
            f"StaticQuantConfig: {flag} must be True",
            f"got {wrong!r}",
            kind=TypeError,
        )


@pytest.mark.parametrize(
    "name, near",
    [
        ("weight_dtpye", "weight_dtype"),
        ("whitelist", "white_list"),
        ("include", "white_list"),
        ("tile_size", "group_size"),
        ("act_qtype", "activation_dtype"),
    ],
)
def test_an_unknown_field(name, near):
    sentences = (f"StaticQuantConfig has no field {name!r}.", f"Did you mean {near!r}?")
    says(lambda: StaticQuantConfig(**{name: "x"}), *sentences, kind=TypeError)
    says(lambda: StaticQuantConfig().replace(**{name: "x"}), *sentences, kind=TypeError)
    says(lambda: StaticQuantConfig.from_dict({name: "x"}), *sentences, kind=TypeError)
    says(lambda: setattr(StaticQuantConfig(), name, "x"), *sentences, kind=AttributeError)


def test_calibration_methods_are_checked():
    says(
        lambda: StaticQuantConfig(weight_calibration_method="absmx"),
        "StaticQuantConfig: weight_calibration_method='absmx'",
        "Did you mean 'absmax'",
    )
    says(
        lambda: StaticQuantConfig(act_calibration_method="minmax"),
        "act_calibration_method='minmax' with float8_e4m3fn",
    )
    says(lambda: StaticQuantConfig(act_static_reduction="men"), "Did you mean 'mean'?")
    says(
        lambda: DynamicQuantConfig(act_static_reduction="mean"),
        "a DynamicQuantConfig makes its scales at each call",
        "or use a StaticQuantConfig",
    )
    says(
        lambda: StaticQuantConfig("int8", None, act_static_reduction="mean"),
        "activation_dtype is None",
    )
    says(lambda: StaticQuantConfig(scale_dtype="float15"), "scale_dtype", "Did you mean 'float16'?")
    assert StaticQuantConfig(scale_dtype=jnp.bfloat16).scale_dtype == "bfloat16"
    says(
        lambda: StaticQuantConfig(weight_calibration_method=None), "Write 'absmax'", kind=TypeError
    )


# --- fields set later -----------------------------------------------------------------------------


def test_setting_a_field_checks_it_and_keeps_the_old_value():
    config = StaticQuantConfig("int8", "int8")
    says(lambda: setattr(config, "weight_dtype", "fp8"), MIXED, "replace(weight_dtype=")
    says(lambda: setattr(config, "white_list", "Dense"), "Write white_list=['Dense']")
    says(lambda: setattr(config, "const_scale", 1), "True or False", kind=TypeError)
    assert config == StaticQuantConfig("int8", "int8")
    assert config.replace(weight_dtype="fp8", activation_dtype="fp8") == StaticQuantConfig("fp8")
    assert config == StaticQuantConfig("int8", "int8")


def test_what_follows_goes_on_following():
    config = DynamicQuantConfig()
    config.weight_dtype = "INT8"
    assert (config.weight_dtype, config.activation_dtype) == ("int8", "int8")
    config.weight_dtype = "int4"
    assert (config.activation_dtype, config.weight_scale_granularity) == (None, "per_channel")
    config.activation_dtype = "int8"
    config.weight_dtype = "int2"
    assert config.activation_dtype == "int8"


def test_a_copy_is_a_config_of_its_own():
    config = StaticQuantConfig(white_list=["a"]).set_local("head", DynamicQuantConfig("int8"))
    for twin in (copy.copy(config), copy.deepcopy(config), config.replace()):
        assert twin == config
    twin = copy.deepcopy(config)
    twin.white_list.append("b")
    twin.local_config["head"].weight_dtype = "int4"
    assert config.white_list == ["a"] and config.local_config["head"].weight_dtype == "int8"
    given = ["a"]
    config = StaticQuantConfig(white_list=given)
    given.append("([x")
    assert config.white_list == ["a"]


def test_what_is_changed_inside_a_list_is_checked_when_it_is_used():
    config = StaticQuantConfig(white_list=["dense"])
    config.white_list.append("([x")
    for use in (
        lambda: choose(config, LAYERS),
        lambda: config.to_dict(),
        lambda: config.to_config_mapping(model_info=LAYERS),
    ):
        says(use, "Invalid regex pattern '([x' in white_list/exclude_list filter.")


def test_repr_evaluates_to_the_config():
    config = StaticQuantConfig("int4", group_size=32, white_list=[Dense, "net/.*"])
    config.set_local("head", DynamicQuantConfig("int8", None))
    both = config + DynamicQuantConfig(exclude_list=["conv"])
    for value in (StaticQuantConfig(), config, both):
        assert eval(repr(value)) == value
    assert repr(StaticQuantConfig("int8", const_scale=True)) == (
        "StaticQuantConfig(weight_dtype='int8', activation_dtype='int8', const_scale=True)"
    )


def test_the_base_is_not_a_config():
    says(lambda: JaxBaseConfig(), "Write StaticQuantConfig(...)", kind=TypeError)


# --- filters --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "filters, layer, expected",
    [
        ({}, ("net/first", "Dense"), True),
        ({"white_list": None}, ("net/first", "Dense"), False),
        ({"white_list": ["Dense"]}, ("net/foo", "Dense"), True),
        ({"white_list": ["EinsumDense"]}, ("net/first", "Dense"), False),
        ({"white_list": [Dense]}, ("net/foo", "Dense"), True),
        ({"white_list": [Conv2D]}, ("net/first", "Dense"), False),
        ({"white_list": [Dense]}, ("net/foo", MyDense), True),
        ({"white_list": ["Dense"]}, ("net/foo", MyDense), True),
        ({"white_list": ["MyDense"]}, ("net/foo", Dense), False),
        ({"white_list": [Dense]}, ("net/Dense", "Conv2D"), False),
        ({"white_list": ["encoder/.*"]}, ("net/encoder/first", "Dense"), True),
        ({"white_list": ["encoder/.*"]}, ("net/decoder/first", "Dense"), False),
        ({"white_list": ("first", "third")}, ("net/third", "Dense"), True),
        ({"exclude_list": ["Dense"]}, ("net/first", "Dense"), False),
        ({"exclude_list": [Dense]}, ("net/first", MyDense), False),
        ({"exclude_list": ["second"]}, ("net/second", "Dense"), False),
        ({"exclude_list": ["second"]}, ("net/first", "Dense"), True),
        ({"white_list": ["fi", "se"], "exclude_list": ["second"]}, ("net/second", "Dense"), False),
        ({"white_list": ["fi", "se"], "exclude_list": ["second"]}, ("net/first", "Dense"), True),
    ],
)
def test_filters(config_class, filters, layer, expected):
    config = config_class(**filters)
    assert config._layer_matches_filters(*layer) is expected
    assert (layer in config.to_config_mapping(model_info=[layer])) is expected


@BOTH
@pytest.mark.parametrize("field", ["white_list", "exclude_list"])
def test_bad_filters(config_class, field):
    def make(value):
        return lambda: config_class(**{field: value})

    where = config_class.__name__
    says(make("Dense"), f"{where}: {field}='Dense' is one string", f"Write {field}=['Dense']")
    says(make([]), f"{where}: {field} is an empty list, which names no layer.")
    says(
        make(["([x"]),
        "Invalid regex pattern '([x' in white_list/exclude_list filter.",
        f"{where}: {field} has an entry that is not a regular expression: unterminated character",
    )
    says(make(["*/mlp"]), "Write '.*/mlp'?")
    says(make([r"(a)\1"]), f"{where}: {field}: the pattern", "cannot be matched within a bound")
    says(make([3]), f"{field} has the int 3, which is no entry", "'Dense'", kind=TypeError)
    says(make([""]), f"{field} has the string ''", kind=TypeError)
    says(make(3), f"{field} must be", "got the int 3", kind=TypeError)
    assert "{" not in error(make("Dense")) + error(make([]))


def test_a_star_is_for_the_white_list_alone():
    assert StaticQuantConfig(white_list="*").white_list == "*"
    says(lambda: StaticQuantConfig(exclude_list="*"), "exclude_list='*' is one string")


def test_a_set_of_entries_has_one_order():
    assert StaticQuantConfig(white_list={"b", "a", Dense}).white_list == [Dense, "a", "b"]


# --- local settings -------------------------------------------------------------------------------


def test_set_local_takes_names_classes_and_lists():
    int8, int4 = DynamicQuantConfig("int8"), DynamicQuantConfig("int4")
    config = StaticQuantConfig()
    assert config.set_local(Conv2D, int8) is config
    config.set_local(["head", "dense_1"], int4)
    choices = choose(config, LAYERS)
    assert choices["net/conv"].config is int8
    assert choices["net/head"].config is choices["net/dense_1"].config is int4
    assert choices["net/dense"].config is config
    assert list(config.local_config) == ["Conv2D", "head", "dense_1"]


def test_a_path_is_stronger_than_a_class_and_the_last_than_the_first():
    first, second, third = (DynamicQuantConfig(t) for t in ("int8", "int4", "int2"))
    config = StaticQuantConfig(white_list=None, exclude_list=["dense_1"])
    config.set_local("head", first).set_local("net", second).set_local("Dense", third)
    choices = choose(config, LAYERS)
    assert choices["net/head"].config is choices["net/dense"].config is second
    assert not choices["net/dense_1"].quantized
    config.set_local("head", first)
    assert choose(config, LAYERS)["net/head"].config is first


def test_bad_local_settings():
    config = StaticQuantConfig()
    local = DynamicQuantConfig()
    says(
        lambda: config.set_local("head", None),
        "StaticQuantConfig.set_local('head', ...): a StaticQuantConfig or DynamicQuantConfig is",
        "got None",
        "exclude_list=[...]",
        kind=TypeError,
    )
    says(lambda: config.set_local("([x", local), "Invalid regex pattern '([x'", "set_local")
    says(lambda: config.set_local([], local), "an empty list names no layer")
    says(lambda: config.set_local(3, local), "which is no entry", kind=TypeError)
    says(lambda: config.set_local("head", config), "the config is this config itself")
    says(
        lambda: config.set_local("head", StaticQuantConfig(white_list=["a"])),
        "the config has a white_list",
        "set_local names the layers",
    )
    inner = DynamicQuantConfig().set_local("x", StaticQuantConfig())
    says(lambda: config.set_local("head", inner), "has settings of its own for some layers")
    assert config.local_config == {}
    says(
        lambda: (config + local).set_local("head", local),
        "config_list[0].set_local(...)",
        kind=TypeError,
    )


# --- sums -----------------------------------------------------------------------------------------


def test_a_sum_keeps_its_operands_and_flattens():
    a, b, c = StaticQuantConfig(), DynamicQuantConfig(), StaticQuantConfig("int8")
    both = a + b
    three = both + c
    assert isinstance(both, JaxComposableConfig)
    assert both.config_list[0] is a and both.config_list[1] is b and len(both.config_list) == 2
    assert [config.name for config in three.config_list] == [
        *("static_quant", "dynamic_quant", "static_quant")
    ]
    assert a + (b + c) == three and three != both + a
    assert len((both + three).config_list) == 5
    assert both.strict and not (both + StaticQuantConfig(strict=False)).strict


def test_the_last_config_that_matches_wins():
    static_a = StaticQuantConfig("int8", white_list=["conv", "dense$"])
    dynamic = DynamicQuantConfig(white_list=["dense"])
    static_b = StaticQuantConfig("int8", white_list=["Dense"], exclude_list=["dense"])
    choices = choose(static_a + dynamic + static_b, LAYERS)
    kinds = {path: choice.kind for path, choice in choices.items()}
    assert kinds == {
        "net/embed": None,
        "net/conv": "static",
        "net/dense": "dynamic",
        "net/dense_1": "dynamic",
        "net/head": "static",
    }
    assert choices["net/embed"].reason == "not in white_list"


def test_bad_sums():
    config = StaticQuantConfig()
    says(lambda: config + None, "Cannot add None to a StaticQuantConfig", kind=TypeError)
    says(lambda: JaxComposableConfig([]), "without any config")
    says(lambda: JaxComposableConfig(config), "one StaticQuantConfig stands", kind=TypeError)
    says(lambda: JaxComposableConfig([config, "x"]), "'x', which is no config", kind=TypeError)
    both = config + config
    says(lambda: setattr(both, "weight_dtype", "int8"), "config_list[0]", kind=AttributeError)


def test_statistics_of_other_front_ends_are_refused():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    says(
        lambda: fewbit.quantize_model(layer, DynamicQuantConfig(), quant_stats={}),
        "A Keras model takes no quant_stats",
        "fewbit.quantize_model(model, config, calib_function)",
        kind=TypeError,
    )
