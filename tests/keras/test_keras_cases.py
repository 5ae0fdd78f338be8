"""Cases that quantize_model must get right: odd data, odd models, odd ways to run them."""

import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras_cases import says
from keras_nets import (
    KINDS,
    QUICK_KINDS,
    WEIGHT_ONLY,
    class_names,
    error_of,
    quantized,
    sample,
    tolerance,
    two_layers,
)

import fewbit
import fewbit.keras
from fewbit.keras import DynamicQuantConfig, StaticQuantConfig

INT8 = DynamicQuantConfig("int8")
STATIC = StaticQuantConfig("int8")
X = sample(4, 32)
LONG = pytest.mark.long
EVERY_KIND = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK_KINDS else LONG) for kind in KINDS]
)


# odd data


@EVERY_KIND
def test_all_zero_input(kind):
    zeros = np.zeros_like(X)
    model = quantized(two_layers(bias_initializer="ones"), KINDS[kind], X)
    assert np.isfinite(np.asarray(model(zeros))).all()
    assert np.isfinite(np.asarray(model(X))).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "static" in kind])
def test_all_zero_calibration_is_refused(kind):
    model, zeros = two_layers(bias_initializer="ones"), np.zeros_like(X)
    wanted = np.asarray(model(X))
    says(
        lambda: quantized(model, KINDS[kind], zeros),
        "Calibration saw nothing but zeros at the inputs of 1 of the layers that need a range: "
        "net/up. With a range of zero they would turn every input to zero.",
        "Calibrate on data like those of use, exclude these layers (exclude_list), or pass "
        "strict=False in the config to leave them float.",
        kind=fewbit.keras.CalibrationError,
    )
    assert class_names(model) == ["Dense", "Dense"]
    lenient = KINDS[kind].replace(strict=False)
    with pytest.warns(UserWarning, match="nothing but zeros at the inputs of 1 of the layers"):
        quantized(model, lenient, zeros)
    assert class_names(model) == ["Dense", "QStaticDense"]
    assert np.isfinite(np.asarray(model(X))).all() and np.asarray(model(X)).shape == wanted.shape


@pytest.mark.parametrize("method", ["absmax", "minmax", "percentile,99", "mse"])
def test_all_zero_calibration_by_rules(method):
    rule = fewbit.QuantizationRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_calibration_method=method
    )
    says(
        lambda: quantized(two_layers(), [rule], np.zeros_like(X)),
        "at the inputs of 2 of the layers that need a range: net/up, net/down.",
        "or give these layers a rule of their own, without act_static_scale.",
        kind=fewbit.keras.CalibrationError,
    )


@pytest.mark.parametrize("size", [1e-20, 1e-30])
def test_almost_zero_calibration_is_refused(size):
    model, tiny = two_layers(bias_initializer="ones"), X * np.float32(size)
    told = "too small for a scale at the inputs of 1 of the layers that need a range: net/up."
    says(
        lambda: quantized(model, STATIC, tiny),
        f"Calibration saw nothing but numbers that are {told} They would all become zeros",
        "multiply them by a power of two first, exclude these layers (exclude_list), or pass "
        "strict=False in the config to leave them float.",
        kind=fewbit.keras.CalibrationError,
    )
    with pytest.warns(UserWarning, match="too small for a scale at the inputs of 1 of the layers"):
        quantized(model, STATIC.replace(strict=False), tiny)
    assert class_names(model) == ["Dense", "QStaticDense"]
    rule = fewbit.QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    says(
        lambda: quantized(two_layers(), [rule], tiny),
        "or give these layers a rule of their own, without act_qtype.",
        kind=fewbit.keras.CalibrationError,
    )


def test_a_rule_for_activations_alone():
    rules, model = [fewbit.QuantizationRule(act_qtype="int8")], two_layers()
    for act in (fewbit.keras.quantize_model, fewbit.plan):
        says(
            lambda act=act: act(model, rules),
            "Nothing in net would be quantized. Rule 0 has act_qtype without weight_qtype, and so "
            "switches off what it matches. Write QuantizationRule(weight_qtype='int8', "
            "act_qtype='int8').",
            kind=ValueError,
        )
    both = [
        fewbit.QuantizationRule(module_path=".*/up", act_qtype="int8"),
        fewbit.QuantizationRule(weight_qtype="int8"),
    ]
    notes = fewbit.plan(model, both).notes
    assert any("rule 0 switches it off: without weight_qtype its act_qtype" in n for n in notes)


@EVERY_KIND
def test_all_zero_kernels(kind):
    # With biases, or the second layer would be calibrated on zeros.
    model = two_layers(kernel_initializer="zeros", bias_initializer="ones")
    quantized(model, KINDS[kind], X)
    assert np.array_equal(np.asarray(model(X)), np.ones((4, 32), "float32"))


@EVERY_KIND
def test_constant_input(kind):
    x = np.full_like(X, 3.25)
    model = two_layers()
    wanted = np.asarray(model(x))
    assert error_of(quantized(model, KINDS[kind], x)(x), wanted) < tolerance(kind)


def test_inputs_far_from_zero():
    x = np.linspace(100, 100.07, X.size).reshape(X.shape).astype("float32")
    model = keras.Sequential([keras.Input((32,)), layers.Dense(64)])
    model.layers[0].kernel.assign(np.ones((32, 64), "float32"))  # exact in int8: x alone is rounded
    wanted = np.asarray(model(x))
    for config, bar in (
        (INT8, 0.008),
        (STATIC, 0.008),
        (DynamicQuantConfig("int8", emulate=True), 0.003),
        (StaticQuantConfig("int8", emulate=True), 0.003),
    ):
        assert error_of(quantized(model, config, x, inplace=False)(x), wanted) < bar


@pytest.mark.parametrize("run", ["call", "predict"])
def test_nan_in_calibration_names_the_layer(run):
    model, x = two_layers(), X.copy()
    x[1, 2] = np.nan

    def calibrate(model):
        model(x) if run == "call" else model.predict(x, verbose=0)

    says(
        lambda: fewbit.keras.quantize_model(model, STATIC, calibrate),
        "Calibration met NaN or infinity at the input of 'net/up' (Dense), in its call number 1.",
        kind=fewbit.keras.CalibrationError,
    )
    assert class_names(model) == ["Dense", "Dense"]


# models that are not ready


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(64, activation="gelu", name="up")
        self.norm = layers.LayerNormalization()
        self.down = layers.Dense(32, name="down")

    def call(self, x):
        return self.down(self.norm(self.up(x)))


@pytest.mark.parametrize("config", [INT8, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("make", [lambda: keras.Sequential([layers.Dense(4)]), Subclassed])
def test_unbuilt_models(make, config, inplace):
    says(
        lambda: quantized(make(), config, X, inplace=inplace),
        "has not been built, so it has no weights to quantize:",
        "Call it once on sample data, model(x), or model.build(input_shape), then quantize it.",
    )


class Branches(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(32, name="first")
        self.second = layers.Dense(32, name="second")

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build((*input_shape[:-1], 32))
        self.built = True

    def call(self, x, deep=False):
        x = self.first(x)
        return self.second(x) if deep else x


def branches():
    model = Branches(name="branches")
    model(X, deep=True)
    return model


def test_calibration_that_never_reaches_a_layer():
    model = branches()
    says(
        lambda: quantized(model, STATIC, X),
        "Calibration never reached 1 of the layers that need a range: branches/second.",
        "pass strict=False in the config to leave them float.",
        kind=fewbit.keras.CalibrationError,
    )
    assert class_names(model) == ["Dense", "Dense"]
    with pytest.warns(UserWarning, match="never reached 1 of the layers .* branches/second"):
        quantized(model, StaticQuantConfig("int8", strict=False), X)
    assert class_names(model) == ["QStaticDense", "Dense"]
    assert np.asarray(model(X, deep=True)).shape == (4, 32)


def test_calibration_that_runs_nothing():
    says(
        lambda: fewbit.keras.quantize_model(two_layers(), STATIC, lambda model: None),
        "Calibration never reached 2 of the layers that need a range: net/up, net/down.",
        "the function has to run the model that it is given, which with inplace=False is a copy",
        kind=fewbit.keras.CalibrationError,
    )


def test_calibration_that_runs_another_model_than_the_one_it_is_given():
    model = two_layers()
    says(
        lambda: fewbit.keras.quantize_model(model, STATIC, lambda _: model(X), inplace=False),
        "It reached none at all: the function has to run the model that it is given",
        kind=fewbit.keras.CalibrationError,
    )


def test_static_without_calibration():
    says(
        lambda: fewbit.keras.quantize_model(two_layers(), STATIC),
        "Calibration function must be provided for static quantization.",
    )


def test_a_calibration_that_fails_leaves_the_model_as_it_was():
    model = two_layers()
    wanted = np.asarray(model(X))

    def calibrate(model):
        model.predict(X, verbose=0)
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fewbit.keras.quantize_model(model, STATIC, calibrate)
    assert class_names(model) == ["Dense", "Dense"]
    assert model.predict_function is None  # the one that reported
    assert np.array_equal(np.asarray(model(X)), wanted)


@pytest.mark.parametrize("inplace", [True, False])
def test_quantizing_twice(inplace):
    model = quantized(two_layers(), INT8)
    says(
        lambda: quantized(model, INT8, inplace=inplace),
        "Sequential 'net' is quantized already: 'net/up' is a QDynamicDense.",
    )


def test_a_layer_that_was_never_called_is_in_the_plan():
    model = Subclassed(name="sub")
    model.spare = layers.Dense(4, name="spare")
    with pytest.warns(UserWarning, match="unbuilt state"):  # Keras' own
        model(X)
    (note,) = [note for note in fewbit.plan(model, INT8).notes if note.startswith("spare")]
    assert note.endswith("it has not been built, so it has no weights: the model never called it")
    assert class_names(quantized(model, INT8)) == ["QDynamicDense", "LayerNormalization"] + [
        "QDynamicDense"
    ]


def test_other_values_than_models():
    says(lambda: fewbit.keras.quantize_model({"a": 1}, INT8), "got dict", kind=TypeError)


# the twin of inplace=False


class WithConfig(Subclassed):
    def __init__(self, width=5, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.head = layers.Dense(width, name="head")

    def call(self, x):
        return self.head(super().call(x))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


class WithoutConfig(WithConfig):
    def __init__(self, width, **kwargs):
        super().__init__(width, **kwargs)

    get_config = keras.Model.get_config


def functional():
    x = keras.Input((32,))
    return keras.Model(x, layers.Dense(8)(x) + layers.Dense(8)(x))


class Unregistered(layers.Dense):
    pass


def own_layers():
    x = keras.Input((32,))
    return keras.Model(x, Unregistered(8)(x))


@pytest.mark.parametrize(
    "make",
    [two_layers, functional, own_layers, Subclassed, pytest.param(WithConfig, marks=LONG)],
)
def test_inplace_false_leaves_the_original_untouched(make):
    model = make()
    wanted = np.asarray(model(X))
    values, names = [np.asarray(v) for v in model.variables], class_names(model)
    twin = fewbit.keras.quantize_model(
        model, STATIC, lambda model: model.predict(X, verbose=0), inplace=False, progress=False
    )
    twin.predict(X, verbose=0)  # compiled: it may give up the arrays that it is called with
    assert type(twin) is type(model) or isinstance(twin, type(model))
    assert twin is not model and class_names(model) == names
    assert all(name.startswith("QStatic") for name in class_names(twin) if "Dense" in name)
    for variable, value in zip(model.variables, values, strict=True):
        assert np.array_equal(np.asarray(variable), value)
    assert np.array_equal(np.asarray(model(X)), wanted)
    assert error_of(twin(X), wanted) < 0.05


def test_inplace_false_without_a_config():
    model = WithoutConfig(5, name="odd")
    model(X)
    says(
        lambda: quantized(model, INT8, inplace=False),
        "WithoutConfig 'odd' cannot be made a second time from its get_config(), which "
        "inplace=False needs:",
        "or quantize the model itself: inplace=True.",
    )
    assert "QDynamicDense" in class_names(quantized(model, INT8))


# layers and models of all kinds


def test_a_shared_layer_is_quantized_once():
    shared = layers.Dense(32)
    x = keras.Input((32,))
    model = keras.Model(x, shared(shared(x)) + shared(x))
    wanted = np.asarray(model(X))
    quantized(model, STATIC, X)
    assert class_names(model) == ["QStaticDense"]
    assert len(shared.variables) == 4  # bias, codes, their scale, the input's scale
    assert error_of(model(X), wanted) < 0.03


def test_nested_models():
    inner = keras.Sequential([keras.Input((32,)), layers.Dense(32, name="in")], name="inner")
    model = keras.Sequential([keras.Input((32,)), inner, layers.Dense(4, name="out")], name="outer")
    twin = quantized(model, INT8, inplace=False)
    assert class_names(twin) == ["QDynamicDense"] * 2 and class_names(model) == ["Dense"] * 2
    assert isinstance(twin.layers[0], keras.Sequential)
    assert error_of(twin(X), model(X)) < 0.03


@pytest.mark.parametrize(
    "config", [pytest.param(INT8, marks=LONG), STATIC], ids=["dynamic", "static"]
)
def test_time_distributed_and_recurrent_layers(config):
    x = sample(2, 5, 32)
    model = keras.Sequential(
        [
            keras.Input((5, 32)),
            layers.TimeDistributed(layers.Dense(32)),
            layers.GRU(16, return_sequences=True),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            layers.SimpleRNN(8),
        ]
    )
    wanted = np.asarray(model(x))
    quantized(model, config, x)
    names = class_names(model)
    assert [name.removeprefix("QStatic").removeprefix("QDynamic") for name in names] == [
        *("Dense", "GRUCell", "LSTMCell", "LSTMCell", "SimpleRNNCell")
    ]
    assert all(name.startswith("Q") for name in names)
    assert model.layers[1].use_cudnn == "auto"  # as it was, though calibration stepped
    assert error_of(model(x), wanted) < 0.06
    assert error_of(model.predict(x, verbose=0), model(x)) < 1e-5


def test_a_gru_runs_its_quantized_cell():
    x = sample(2, 5, 32)
    model = keras.Sequential([keras.Input((5, 32)), layers.GRU(16)])
    wanted = np.asarray(model(x))
    quantized(model, DynamicQuantConfig("int8", weight_scale_granularity="per_channel"))
    cell = model.layers[0].cell
    # The decoded weights in float would be nearer than rounded activations can be.
    decoded = keras.Sequential([keras.Input((5, 32)), layers.GRU(16)])
    decoded.set_weights([np.asarray(v.value) for v in (cell.kernel, cell.recurrent_kernel)]
                        + [np.asarray(cell.bias)])  # fmt: skip
    exact = np.asarray(decoded(x))
    assert 1e-5 < error_of(model(x), exact) and error_of(model(x), wanted) < 0.03
    with pytest.raises(NotImplementedError, match="Read it as `.value`"):
        jax.numpy.asarray(cell.kernel)


class Doubled(layers.Dense):
    def call(self, x, training=None):
        return super().call(x * 2) + 1


class OwnKernel(layers.Layer):
    def __init__(self, units, einsum=False, **kwargs):
        super().__init__(**kwargs)
        self.units, self.einsum = units, einsum

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), name="kernel")

    def call(self, x):
        if self.einsum:
            return keras.ops.einsum("bi,io->bo", x, self.kernel)
        return keras.ops.matmul(x, self.kernel)


def test_subclasses_and_layers_of_ones_own():
    model = keras.Sequential(
        [keras.Input((32,)), Doubled(32), OwnKernel(32), OwnKernel(8, einsum=True)]
    )
    wanted = np.asarray(model(X))
    quantized(model, STATIC, X)
    assert class_names(model) == ["QStaticDoubled", "QStaticOwnKernel", "QStaticOwnKernel"]
    assert isinstance(model.layers[0], Doubled) and isinstance(model.layers[1], OwnKernel)
    assert error_of(model(X), wanted) < 0.03


class Power(layers.Layer):
    """Its call needs more than an input."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=(32, 8), name="table")

    def call(self, x, power):
        return keras.ops.matmul(x, self.table) ** power


def test_registering_how_a_layer_is_called():
    layer = Power(name="power")
    wanted = np.asarray(layer(X, power=2))
    says(
        lambda: fewbit.keras.plan(layer, INT8),
        "'power' (Power): it cannot be called on its build shape (TypeError: Power.call() missing",
        "Say how Power is called, with @fewbit.keras.register_calls(Power)",
    )

    @fewbit.keras.register_calls(Power)
    def calls(layer):
        return [((jax.ShapeDtypeStruct((1, 32), "float32"),), {"power": 2})]

    quantized(layer, INT8)
    assert type(layer).__name__ == "QDynamicPower"
    assert error_of(layer(X, power=2), wanted) < 0.05


def three():
    return keras.Sequential(
        [
            keras.Input((32,)),
            layers.Dense(32, name="one"),
            layers.Dense(32, name="two"),
            layers.EinsumDense("bi,io->bo", 8, name="three"),
        ],
        name="net",
    )


Q, E = "QDynamicDense", "QDynamicEinsumDense"


@pytest.mark.parametrize(
    "lists, names",
    [
        ({"white_list": ["Dense"]}, [Q, Q, "EinsumDense"]),
        ({"white_list": [layers.EinsumDense]}, ["Dense", "Dense", E]),
        ({"white_list": ["/one$"]}, [Q, "Dense", "EinsumDense"]),
        ({"white_list": ["/one$", "EinsumDense"]}, [Q, "Dense", E]),
        ({"exclude_list": ["/one$"]}, ["Dense", Q, E]),
        ({"white_list": [layers.Dense], "exclude_list": ["two"]}, [Q, "Dense", "EinsumDense"]),
    ],
)
def test_lists_choose_layers(lists, names):
    assert class_names(quantized(three(), DynamicQuantConfig("int8", **lists))) == names


def test_sums_of_configs_and_rules_choose_layers():
    config = StaticQuantConfig("int8", white_list=["one"]) + DynamicQuantConfig(
        "int4", white_list=["two"], group_size=32
    )
    rules = [
        fewbit.QuantizationRule(module_path="net/one", weight_qtype="int8", act_qtype="int8",
                                act_static_scale=True),
        fewbit.QuantizationRule(module_path="net/two", weight_qtype="int4", tile_size=32),
    ]  # fmt: skip
    results = []
    for choice in (config, rules):
        keras.utils.set_random_seed(1)
        model = three()
        wanted = np.asarray(model(X))
        quantized(model, choice, X)
        assert class_names(model) == ["QStaticDense", "QDynamicDense", "EinsumDense"]
        assert error_of(model(X), wanted) < 0.25
        results.append([layer.a_scale is None for layer in model.layers[:2]])
    assert results == [[False, True]] * 2


# scales that users read


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("const", [False, pytest.param(True, marks=LONG)])
def test_scales_have_the_known_shapes(granularity, const):
    model = keras.Sequential(
        [
            keras.Input((4, 4, 32)),
            layers.Conv2D(64, 3, name="conv"),
            layers.Reshape((4, 64)),
            layers.EinsumDense("abc,cde->abde", (4, 4, 32), name="einsum"),
            layers.Flatten(),
            layers.Dense(128, name="dense"),
        ]
    )
    kernels = {layer.name: layer.kernel.shape for layer in model.layers if layer.variables}
    config = StaticQuantConfig(
        "int8", weight_scale_granularity=granularity, const_scale=const, const_weight=const,
        emulate=True,
    )  # fmt: skip
    floats = {name: np.asarray(model.get_layer(name).kernel) for name in kernels}
    quantized(model, config, sample(2, 4, 4, 32))
    reduced = {"conv": (0, 1, 2), "einsum": (0,), "dense": (0,)}
    for (name, shape), axes in zip(kernels.items(), reduced.values(), strict=True):
        layer = model.get_layer(name)
        axes = tuple(range(len(shape))) if granularity == "per_tensor" else axes
        wanted = np.abs(floats[name]).max(axis=axes, keepdims=True) / 127
        values = (layer.w_scale, layer.a_scale, layer.a_zero_point)
        if not const:
            values = tuple(value.value for value in values)
        w_scale, a_scale, zero = (np.asarray(value) for value in values)
        assert w_scale.shape == wanted.shape
        np.testing.assert_allclose(w_scale, wanted, rtol=1e-6)
        assert a_scale.shape == zero.shape == (1,)


# ways to run


@pytest.mark.parametrize(
    "policy", ["bfloat16", "mixed_bfloat16", pytest.param("mixed_float16", marks=LONG)]
)
@pytest.mark.parametrize(
    "kind", ["dynamic int8", "static fp8", pytest.param("weight-only int4", marks=LONG)]
)
def test_precision_policies(policy, kind):
    model = two_layers(dtype=policy)
    wanted = model(X)
    quantized(model, KINDS[kind], X)
    y = model(X)
    assert y.dtype == wanted.dtype
    assert error_of(y, wanted) < tolerance(kind) + 0.02
    assert error_of(model.predict(X, verbose=0), y) < 0.01


@pytest.mark.parametrize("how", [{"jit_compile": True}, {"jit_compile": False}, {"run_eagerly": 1}])
def test_compiled_and_eager_runs_agree(how):
    model = quantized(two_layers(), STATIC, X)
    y = np.asarray(model(X))
    model.compile(loss="mse", **how)
    np.testing.assert_allclose(model.predict(X, verbose=0), y, rtol=1e-5, atol=1e-5)
    assert model.evaluate(X, y, verbose=0) < 1e-9
    np.testing.assert_allclose(jax.jit(model)(X), y, rtol=1e-5, atol=1e-5)


def test_calibration_sees_every_way_of_running():
    wanted = None
    for run in (
        lambda model: model(X),
        lambda model: model.predict(X, verbose=0),
        lambda model: jax.jit(model)(X),
        lambda model: [model(X[:2]), model(X[2:])],
        [X[:2], X[2:]],
        [(X, X)],
    ):
        keras.utils.set_random_seed(0)
        model = fewbit.keras.quantize_model(two_layers(), STATIC, run, progress=False)
        scales = [np.asarray(layer.a_scale) for layer in model.layers]
        wanted = wanted or scales
        np.testing.assert_allclose(scales, wanted, rtol=1e-6)


def test_our_own_code_runs_under_strict_promotion():
    model = keras.Sequential([keras.Input((32,)), layers.Dense(32, use_bias=False)])
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for kind in QUICK_KINDS:
            y = quantized(model, KINDS[kind], X, inplace=False)(X)
            assert np.isfinite(np.asarray(y)).all()


@pytest.fixture
def eight_devices():
    yield keras.distribution.list_devices()
    keras.distribution.set_distribution(None)


def wide():
    return keras.Sequential(
        [keras.Input((256,)), layers.Dense(512, name="up"), layers.Dense(64, name="down")]
    )


def test_data_parallel(eight_devices):
    assert len(eight_devices) == 8
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=eight_devices))
    x = sample(16, 256)
    model = wide()
    wanted = model.predict(x, verbose=0)
    quantized(model, STATIC, x)
    assert error_of(model.predict(x, verbose=0), wanted) < 0.03


@pytest.mark.parametrize(
    "config, entries, columns",
    [
        (INT8, {".*kernel": (None, "model"), ".*bias": ("model",)}, True),
        (STATIC, {".*kernel.*": (None, "model")}, True),  # also says it of our parts
        (DynamicQuantConfig("int4", group_size=32), {".*kernel": ("model", None)}, False),
    ],
    ids=["columns", "greedy pattern", "rows"],
)
def test_model_parallel(eight_devices, config, entries, columns):
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], eight_devices)
    layout = keras.distribution.LayoutMap(mesh)
    for pattern, axes in entries.items():
        layout[pattern] = axes
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )
    x = sample(16, 256)
    model = wide()
    wanted = model.predict(x, verbose=0)
    quantized(model, config, x)
    codes = next(v for v in model.layers[0].variables if v.name == "kernel_qvalue")
    assert ("model" in codes.value.sharding.spec) or not columns  # they stay where they were
    bar = 0.03 if config.weight_dtype == "int8" else 0.25
    assert error_of(model.predict(x, verbose=0), wanted) < bar
    assert error_of(model(x), wanted) < bar


# what the process imports


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )


def test_no_tensorflow():
    code = """
import sys, warnings, numpy as np
import fewbit.keras, keras
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64)])
config = fewbit.keras.StaticQuantConfig("int8")
fewbit.keras.quantize_model(model, config, lambda m: m(np.ones((2, 32), "float32")))
print([name for name in ("tensorflow", "torch", "keras_hub", "flax") if name in sys.modules])
"""
    done = run_python(code, KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")


def test_other_backends_are_a_clear_error():
    done = run_python("import fewbit.keras", KERAS_BACKEND="numpy")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: fewbit.keras only supports the JAX backend, but the current Keras backend is "
        "'numpy'. Set KERAS_BACKEND=jax in the environment before Keras is first imported"
    )


@LONG
def test_weight_only_formats():
    wanted = {"int8": 45, "int6": 30, "int4": 18, "int3": 10, "nf4": 16, "mxfp4": 13, "fp8": 27}
    model = keras.Sequential([keras.Input((128,)), layers.Dense(64)])
    x = sample(8, 128)
    y = np.asarray(model(x))
    for name, decibels in wanted.items():
        groups = {"group_size": 32} if name.startswith("int") and name != "int8" else {}
        config = DynamicQuantConfig(name, **groups, **WEIGHT_ONLY)
        error = np.asarray(quantized(model, config, inplace=False)(x)) - y
        assert 10 * np.log10((y**2).sum() / (error**2).sum()) > decibels, name


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_keras_own_quantize_on_a_quantized_model_is_an_error():
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(32)])
    fewbit.keras.quantize_model(model, DynamicQuantConfig("int8"), progress=False)
    with pytest.raises(ValueError, match="would find no float kernel here"):
        model.quantize("int8")


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_a_kernel_that_is_not_finite_is_named(granularity):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="up")])
    kernel = np.ones((4, 4), "float32")
    kernel[1, 2] = np.nan
    model.layers[0].kernel.assign(kernel)
    config = DynamicQuantConfig("int8", weight_scale_granularity=granularity)
    with pytest.raises(ValueError, match="up/kernel"):
        fewbit.keras.quantize_model(model, config, progress=False)
