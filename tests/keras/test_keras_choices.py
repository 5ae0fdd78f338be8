"""Which layer gets which config or rule, and what is said about those that match nothing."""

import os
import re

os.environ.setdefault("KERAS_BACKEND", "jax")

import pytest
from keras_cases import BOTH, LAYERS, Dense, MyDense, RotaryEmbedding, chosen, says

from fewbit import PlanError, QuantizationRule
from fewbit.keras import (
    DynamicQuantConfig,
    StaticQuantConfig,
)
from fewbit.keras.config._choose import choose
from fewbit.keras.config._fields import QUANTIZABLE

# --- choices --------------------------------------------------------------------------------------


def test_a_config_becomes_a_rule_for_each_layer():
    config = StaticQuantConfig(
        "int4",
        group_size=32,
        act_static_reduction="mean",
        weight_calibration_method="mse",
        act_calibration_method="percentile,99.9",
        scale_dtype="float16",
    )
    choice = choose(config, [("net/a.b", Dense)])["net/a.b"]
    assert choice.rule == QuantizationRule(
        module_path=re.escape("net/a.b") + "(/.*)?",
        weight_qtype="int4",
        act_qtype="int8",
        tile_size=32,
        act_static_scale=True,
        act_static_reduction="mean",
        weight_calibration_method="mse",
        act_calibration_method="percentile,99.9",
        scale_dtype="float16",
    )
    assert (choice.kind, choice.granularity, choice.emulate) == ("static", "per_group", False)
    assert choice.config is config and choice.reason == "" and choice.quantized
    assert choice.rule.matches("net/a.b", "dot_general")
    assert choice.rule.matches("net/a.b/query", "einsum")
    assert not choice.rule.matches("net/a_b", "dot_general")


def test_kinds_and_granularities():
    def one(config):
        choice = choose(config, LAYERS[2:3])["net/dense"]
        return choice.kind, choice.granularity, choice.rule.act_static_scale

    assert one(StaticQuantConfig()) == ("static", "per_tensor", True)
    assert one(DynamicQuantConfig()) == ("dynamic", "per_tensor", False)
    assert one(DynamicQuantConfig("int4")) == ("weight_only", "per_channel", None)
    per_channel = DynamicQuantConfig("int8", weight_scale_granularity="per_channel")
    assert one(per_channel) == ("dynamic", "per_channel", False)


def test_emulation_has_a_zero_point_for_integer_activations_alone():
    def method(*args, **kwargs):
        choice = choose(StaticQuantConfig(*args, **kwargs), LAYERS[2:3])["net/dense"]
        return choice.rule.act_calibration_method, choice.rule.weight_calibration_method

    # The largest weight is the code 127, as in the reference: absmax * (127.5 / 127) / 127.5.
    reference = f"absmax,{127.5 / 127!r}"
    assert method("int8", emulate=True) == ("minmax", reference)
    assert method("int8") == (None, "absmax")
    assert method("fp8", emulate=True) == (None, "absmax")
    assert method("int8", emulate=True, act_calibration_method="absmax") == ("absmax", reference)
    assert method("int8", None, emulate=True) == (None, reference)
    assert method("int8", emulate=True, weight_calibration_method="mse") == ("minmax", "mse")
    assert choose(StaticQuantConfig(emulate=True), LAYERS[2:3])["net/dense"].emulate


def test_attention_is_quantized_when_asked_or_emulated():
    assert not StaticQuantConfig().quantizes_attention
    assert StaticQuantConfig(quantize_attention=True).quantizes_attention
    assert StaticQuantConfig(emulate=True).quantizes_attention
    assert not StaticQuantConfig(emulate=True, quantize_attention=False).quantizes_attention
    assert not StaticQuantConfig("int8", None, emulate=True).quantizes_attention


def test_layers_left_alone_say_why():
    config = StaticQuantConfig(white_list=["net"], exclude_list=["Conv2D", "head"])
    layers = [*LAYERS, ("other/dense", Dense), ("net/rope", RotaryEmbedding)]
    reasons = {path: choice.reason for path, choice in choose(config, layers).items()}
    assert reasons == {
        "net/embed": "",
        "net/conv": "excluded by the exclude_list entry 'Conv2D'",
        "net/dense": "",
        "net/dense_1": "",
        "net/head": "excluded by the exclude_list entry 'head'",
        "other/dense": "not in white_list",
        "net/rope": "rotary tables stay float (quantize_rotary=True quantizes them)",
    }
    assert "net/rope" in chosen(StaticQuantConfig(quantize_rotary=True), layers)
    tables = choose(StaticQuantConfig(quantize_embeddings=False), layers)
    assert tables["net/embed"].reason == "quantize_embeddings=False leaves look-up tables float"


def test_a_white_list_that_matches_nothing():
    says(
        lambda: choose(StaticQuantConfig(white_list=["dens_1", "EinsumDense"]), LAYERS[:2]),
        "StaticQuantConfig: white_list=['dens_1', 'EinsumDense'] matches no layer.",
        "Pass strict=False to turn this into a warning.",
        kind=PlanError,
    )
    says(
        lambda: choose(StaticQuantConfig(white_list=["hed"]), LAYERS),
        "The nearest layer paths are 'net/head'",
        kind=PlanError,
    )
    says(
        lambda: choose(StaticQuantConfig(white_list=["Dence"]), LAYERS),
        "The nearest layer class is 'Dense'.",
        kind=PlanError,
    )
    says(
        lambda: choose(StaticQuantConfig(white_list=None), LAYERS),
        "white_list=None selects no layer, and set_local names none",
        "Write white_list='*'",
        kind=PlanError,
    )
    says(
        lambda: choose(StaticQuantConfig(white_list=["Dense"]), []),
        "The model has no layer that can be quantized.",
        kind=PlanError,
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaticQuantConfig(white_list=["dense", "haed"]),
        lambda: StaticQuantConfig(exclude_list=["haed"]),
        lambda: StaticQuantConfig().set_local("haed", DynamicQuantConfig()),
        lambda: StaticQuantConfig() + DynamicQuantConfig(exclude_list=["haed"]),
    ],
)
def test_an_entry_that_matches_nothing(make):
    says(
        lambda: choose(make(), LAYERS),
        "entry 'haed' matches no layer. The nearest layer paths are 'net/head'",
        kind=PlanError,
    )


def test_without_strict_what_matches_nothing_is_one_warning():
    config = StaticQuantConfig(white_list=["dense", "haed"], exclude_list=["conf"], strict=False)
    with pytest.warns(UserWarning, match="'haed' matches no layer.*'conf' matches no layer"):
        assert chosen(config) == ["net/dense", "net/dense_1"]
    with pytest.warns(UserWarning, match="white_list=None selects no layer"):
        assert chosen(StaticQuantConfig(white_list=None), strict=False) == []


def test_a_kind_of_layer_may_be_absent():
    assert "EinsumDense" in QUANTIZABLE
    config = StaticQuantConfig(white_list=["Dense", "EinsumDense"], exclude_list=["Conv3D"])
    assert chosen(config) == ["net/dense", "net/dense_1", "net/head"]


def test_two_layers_of_one_path():
    twins = [("dense", Dense), ("dense", MyDense)]
    assert chosen(StaticQuantConfig(), twins) == ["dense"]
    says(
        lambda: choose(StaticQuantConfig(exclude_list=[MyDense]), twins),
        "Two layers have the path 'dense'",
        "Build the model first",
        kind=PlanError,
    )


@pytest.mark.parametrize(
    "wrong, fix",
    [
        (None, "Write StaticQuantConfig() or DynamicQuantConfig()."),
        ({"weight_dtype": "int8"}, "Read a dict with JaxBaseConfig.from_dict(...)."),
        ("config.json", "Read a file with JaxBaseConfig.from_json_file(...)"),
        (StaticQuantConfig, "Write StaticQuantConfig()."),
        (QuantizationRule(weight_qtype="int8"), "Write a list: [rule]."),
        ([StaticQuantConfig()], "Add configs: config + config."),
        ([3], "The list has the int 3."),
        ([], "got an empty list"),
    ],
)
def test_what_is_no_config(wrong, fix):
    says(lambda: choose(wrong, LAYERS), "StaticQuantConfig", fix, kind=TypeError)


# --- rules in place of a config -------------------------------------------------------------------


def test_the_first_rule_that_matches_a_path_wins():
    rules = [
        QuantizationRule(module_path="net/head"),
        QuantizationRule(module_path="net/dense.*", weight_qtype="int4", tile_size=32),
        QuantizationRule(module_path=".*/conv", weight_qtype="int8", act_qtype="int8"),
        QuantizationRule(
            op_names=("take",), weight_qtype="int8", act_qtype="int8", act_static_scale=True
        ),
    ]
    choices = choose(rules, [*LAYERS, ("other", Dense)])
    shown = {p: (c.kind, c.granularity, c.reason) for p, c in choices.items()}
    assert shown == {
        "net/embed": ("static", "per_channel", ""),
        "net/conv": ("dynamic", "per_channel", ""),
        "net/dense": ("weight_only", "per_group", ""),
        "net/dense_1": ("weight_only", "per_group", ""),
        "net/head": (None, None, "rule 0 switches it off"),
        "other": (None, None, "no rule matches"),
    }
    assert choices["net/dense"].rule == rules[1].replace(module_path="net/dense(/.*)?")
    assert choices["net/dense"].config is None


def test_a_rule_that_matches_nothing():
    rule = QuantizationRule(module_path="net/haed", weight_qtype="int8")
    rest = QuantizationRule(weight_qtype="int8")
    says(
        lambda: choose([rule, rest], LAYERS),
        "QuantizationRule(module_path='net/haed', weight_qtype='int8') matches no layer.",
        "The nearest layer paths are 'net/head'",
        "Pass strict=False",
        kind=PlanError,
    )
    with pytest.warns(UserWarning, match="matches no layer"):
        assert len(chosen([rule, rest], strict=False)) == len(LAYERS)
    says(
        lambda: choose([rest, QuantizationRule(module_path="net/head")], LAYERS),
        "decides no layer: an earlier rule matches first wherever it would, rule 0",
        kind=PlanError,
    )
    conv = QuantizationRule(module_path="net/head", op_names=("conv_general_dilated",))
    says(
        lambda: choose([conv, rest], LAYERS),
        "The layers at that path have none of the ops conv_general_dilated.",
        kind=PlanError,
    )


# --- models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    keras = pytest.importorskip("keras")

    class OwnDense(keras.layers.Dense):
        pass

    layers = [keras.layers.Dense(4, name="first"), keras.layers.LayerNormalization(name="norm")]
    net = keras.Sequential([*layers, OwnDense(4, name="second")], name="net")
    net.build((None, 3))
    return net


@BOTH
def test_the_layers_of_a_model(config_class, model):
    config = config_class(white_list=["Dense"], exclude_list=["first"])
    info = config.get_model_info(model)
    assert info == [("net/first", "Dense"), ("net/second", "OwnDense")]
    assert list(config.to_config_mapping(model_info=info)) == [("net/second", "OwnDense")]
    assert (config + config).get_model_info(model) == info
    empty = config_class(white_list=["EinsumDense"])
    assert empty.to_config_mapping(model_info=empty.get_model_info(model)) == {}
    assert chosen(config, info) == ["net/second"]


def test_class_objects_of_keras(model):
    import keras

    layers = [(layer.path, type(layer)) for layer in model.layers]
    config = DynamicQuantConfig(white_list=[keras.layers.Dense])
    assert chosen(config, layers) == ["net/first", "net/second"]
    assert config.to_dict()["config"]["white_list"] == ["Dense"]


def test_what_is_no_model():
    says(
        lambda: StaticQuantConfig().get_model_info(object()),
        "A Keras model is needed, got an object.",
        kind=TypeError,
    )
    says(lambda: StaticQuantConfig().to_config_mapping(), "model_info=config.get_", kind=TypeError)


def test_every_quantizable_class_of_keras_exists():
    keras = pytest.importorskip("keras")
    public = [getattr(keras.layers, name) for name in dir(keras.layers)]
    names = {cls.__name__ for cls in public if isinstance(cls, type)}
    hub = {name for name in QUANTIZABLE if "Gemma" in name or "Rotary" in name}
    hub |= {"LlamaAttention", "CachedMistralAttention", "QwenAttention"}
    assert QUANTIZABLE - hub <= names
