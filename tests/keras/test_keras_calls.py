"""How fewbit finds out how a layer is called, and what it says where it cannot."""

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras_cases import says
from keras_nets import class_names, error_of, quantized, sample

import fewbit
import fewbit.keras
from fewbit.keras import DynamicQuantConfig, StaticQuantConfig
from fewbit.keras.layers import _calls
from fewbit.planning._messages import PlanError

X = sample(4, 32)
INT8 = DynamicQuantConfig("int8")
LENIENT = DynamicQuantConfig("int8", strict=False)


class Table(layers.Layer):
    def build(self, input_shape):
        self.table = self.add_weight(shape=(32, 32), name="table")


class Power(Table):
    def call(self, x, power):
        return keras.ops.matmul(x, self.table) ** power


class OfADict(Table):
    """A layer that fails otherwise than with TypeError on the shape it was built for."""

    def call(self, x):
        return keras.ops.matmul(x["rows"].unknown if "rows" not in x else x["rows"], self.table)


class Shapeless(Table):
    """Built without a shape, as layers of KerasHub's SAM are."""

    def build(self):
        self.table = self.add_weight(shape=(32, 32), name="table")

    def call(self, x):
        return keras.ops.matmul(x, self.table)


class OwnBuildConfig(Table):
    def get_build_config(self):
        return {"width": 32}

    def build_from_config(self, config):
        self.build((None, config["width"]))

    def call(self, x):
        return keras.ops.matmul(x, self.table)


class BrokenBuildConfig(OwnBuildConfig):
    def get_build_config(self):
        raise RuntimeError("not kept")


class Asks(Table):
    def call(self, x):
        return keras.ops.matmul(x, self.table) if float(x[0, 0]) < 9 else x


class Fails(Table):
    def call(self, x):
        if isinstance(x, jax.core.Tracer):
            raise KeyError("no tracers")
        return keras.ops.matmul(x, self.table)


def graph(call):
    x = keras.Input((32,))
    return keras.Model(x, layers.Dense(8, name="head")(call(x)), name="net")


GRAPHS = {
    "two arguments": lambda: graph(lambda x: Power(name="own")(x, power=2)),
    "a dict": lambda: graph(lambda x: OfADict(name="own")({"rows": x})),
    "no shape": lambda: graph(lambda x: Shapeless(name="own")(x)),
    "own build config": lambda: graph(lambda x: OwnBuildConfig(name="own")(x)),
    "broken build config": lambda: graph(lambda x: BrokenBuildConfig(name="own")(x)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_layers_are_called_as_their_model_calls_them(name):
    model = GRAPHS[name]()
    wanted = np.asarray(model(X))
    before = fewbit.plan(model, INT8)
    assert [row.site.path for row in before.sites] == ["own", "head"] and not before.notes
    quantized(model, INT8)
    own = model.get_layer("own")
    assert type(own).__name__.startswith("QDynamic") and "call" not in vars(own)
    assert error_of(model(X), wanted) < 0.1
    assert [row.site.id for row in fewbit.plan(model).sites] == [r.site.id for r in before.sites]


def test_a_layer_that_a_subclassed_model_calls():
    class Net(keras.Model):
        def __init__(self):
            super().__init__(name="net")
            self.own = Power(name="own")

        def call(self, x):
            return self.own(x, power=2)

    model = Net()
    wanted = np.asarray(model(X))
    assert error_of(quantized(model, StaticQuantConfig("int8"), X)(X), wanted) < 0.1
    assert class_names(model) == ["QStaticPower"]


def own_alone(cls, *args, **kwargs):
    layer = cls(name="own")
    layer(X, *args, **kwargs)
    return layer


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: own_alone(Power, power=2), "TypeError: Power.call() missing 1 required"),
        (lambda: own_alone(Fails), "KeyError: 'no tracers'"),
        (lambda: own_alone(Asks), "its Python code asks for the value of an array"),
        (lambda: own_alone(Shapeless), "it was built without a recorded input shape"),
    ],
    ids=["arguments", "another error", "values", "no shape"],
)
def test_a_layer_that_cannot_be_called_is_an_error_that_names_the_cure(make, why):
    layer = make()
    cls = type(layer).__name__
    for do in (fewbit.keras.plan, quantized):
        says(
            lambda do=do: do(layer, INT8),
            f"1 layer to be quantized cannot be called on examples of inputs: 'own' ({cls}): ",
            why,
            f"Say how {cls} is called, with @fewbit.keras.register_calls({cls}) on a function",
            "exclude_list=['own']",
            "strict=False in the config leaves all such layers float",
            kind=PlanError,
        )
    rules = [fewbit.QuantizationRule(weight_qtype="int8")]
    fix = "by a rule before the others: QuantizationRule(module_path='own', weight_qtype=None)."
    says(lambda: fewbit.keras.plan(layer, rules), why, fix, kind=PlanError)


class Spare(keras.Model):
    """With a layer that its own call leaves out."""

    def __init__(self):
        super().__init__(name="net")
        self.up = layers.Dense(32, name="up")
        self.own = own_alone(Power, power=2)

    def call(self, x):
        return self.up(x)


def stuck_among_others():
    model = Spare()
    model(X)
    return model


def test_without_strict_it_stays_float_with_a_warning():
    model = stuck_among_others()
    with pytest.warns(UserWarning, match=r"'own' \(Power\).*register_calls.*They stay float"):
        quantized(model, LENIENT)
    assert class_names(model) == ["QDynamicDense", "Power"]
    with pytest.warns(UserWarning, match="cannot be called on examples"):
        (note,) = fewbit.plan(stuck_among_others(), LENIENT).notes
    assert note.startswith("own: it cannot be called on its build shape (TypeError: Power.call()")
    assert note.endswith("; see fewbit.keras.register_calls")


def test_the_cures_do_what_they_say():
    excluded = DynamicQuantConfig("int8", exclude_list=["own"])
    assert class_names(quantized(stuck_among_others(), excluded)) == ["QDynamicDense", "Power"]

    @fewbit.keras.register_calls(Power)
    def calls(layer):
        return [((jax.ShapeDtypeStruct((1, 32), "float32"),), {"power": 2})]

    try:
        model = quantized(stuck_among_others(), INT8)
    finally:
        _calls._CALLS.pop(Power)
    assert class_names(model) == ["QDynamicDense", "QDynamicPower"]


def test_registered_calls_that_are_wrong_are_told_and_not_replaced():
    @fewbit.keras.register_calls(Power)
    def calls(layer):
        return [((jax.ShapeDtypeStruct((1, 5), "float32"),), {"power": 2})]

    try:
        model = GRAPHS["two arguments"]()
        says(
            lambda: fewbit.plan(model, INT8),
            "'own' (Power): it cannot be called on the calls registered for it (",
            kind=PlanError,
        )
    finally:
        _calls._CALLS.pop(Power)


class Reads(Table):
    """Reads the weight of a layer that it never calls."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.kept = Shapeless(name="kept")

    def build(self, input_shape):
        super().build(input_shape)
        self.kept.build()

    def call(self, x):
        return keras.ops.matmul(x, self.table) + self.kept.table[0]


def test_a_layer_that_is_never_called_is_a_note():
    model = graph(lambda x: Reads(name="own")(x))
    (note,) = fewbit.plan(model, INT8).notes
    assert note.endswith("kept: the model never calls it, but reads its weights in another way")
    wanted = np.asarray(model(X))
    assert error_of(quantized(model, INT8)(X), wanted) < 0.1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", ["Mixtral", "QwenMoe", "ViTDet"])
def test_models_of_keras_hub_whose_layers_have_calls_of_their_own(name):
    import keras_hub

    text = dict(vocabulary_size=16, num_layers=1, num_query_heads=2, num_key_value_heads=2)
    text |= dict(hidden_dim=16, intermediate_dim=32, num_experts=2, top_k=2)
    ids = np.arange(16).reshape(2, 8) % 16
    batch = {"token_ids": ids, "padding_mask": np.ones((2, 8), "int32")}
    if name == "Mixtral":
        model = keras_hub.models.MixtralBackbone(**text)
    elif name == "QwenMoe":
        sizes = dict(moe_intermediate_dim=16, shared_expert_intermediate_dim=16)
        model = keras_hub.models.QwenMoeBackbone(**text, **sizes)
    else:
        batch = sample(2, 64, 64, 3)
        model = keras_hub.models.ViTDetBackbone(
            **dict(hidden_size=16, num_layers=2, intermediate_dim=32, num_heads=2),
            **dict(global_attention_layer_indices=[1], patch_size=16, num_output_channels=8),
            **dict(window_size=2, image_shape=(64, 64, 3)),
        )
        for table in model.weights:
            if "rel_pos" in table.name:  # zeros before training, which have no static range
                table.assign(sample(*table.shape) / 16)
    wanted = np.asarray(model(batch))
    quantized(model, StaticQuantConfig("int8"), batch)
    assert error_of(model(batch), wanted) < 0.1
    names = class_names(model)
    assert {"Mixtral": "QStaticMixtralMoeExperts"}.get(name, "QStaticDense") in names
    assert "Dense" not in names and "EinsumDense" not in names


@pytest.mark.long
def test_sam_of_keras_hub_can_be_planned():
    import keras_hub

    encoder = keras_hub.models.ViTDetBackbone(
        **dict(hidden_size=16, num_layers=2, intermediate_dim=32, num_heads=2),
        **dict(global_attention_layer_indices=[1], patch_size=16, num_output_channels=8),
        **dict(window_size=2, image_shape=(64, 64, 3)),
    )
    prompts = keras_hub.layers.SAMPromptEncoder(
        hidden_size=8, image_embedding_size=(4, 4), input_image_size=(64, 64), mask_in_channels=4
    )
    decoder = keras_hub.layers.SAMMaskDecoder(
        **dict(num_layers=2, hidden_size=8, intermediate_dim=16, num_heads=2, embedding_dim=8),
        **dict(num_multimask_outputs=3, iou_head_depth=2, iou_head_hidden_dim=8),
    )
    model = keras_hub.models.SAMBackbone(encoder, prompts, decoder)
    plan = fewbit.plan(model, INT8)
    assert len(plan.sites) > 20 and all(row.quantized for row in plan.sites)
