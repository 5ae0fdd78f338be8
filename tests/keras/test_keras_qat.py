"""Keras models that train quantized: `fit`, saving between epochs, and what serves afterwards."""

import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras_remembering import DELAYED as FP8

import fewbit
import fewbit.keras
from fewbit import QtProvider, QtRule

FULL = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(64, 8, 8, 3)).astype("float32")
LABELS = (IMAGES.mean((1, 2)) @ np.array([3.0, -2.0, 1.0]) > 0).astype("int32")


def convnet():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="conv"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(32, activation="relu", name="up"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(2, name="out"),
        ],
        name="net",
    )


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def fit(model, epochs=6):
    history = model.fit(IMAGES, LABELS, batch_size=16, epochs=epochs, verbose=0, shuffle=False)
    return history.history["loss"]


@pytest.mark.parametrize(
    "rule",
    [
        FULL,
        FULL.replace(bwd_qtype=None),
        FULL.replace(bwd_stochastic_rounding="uniform"),
        FULL.replace(act_static_scale=True),
        FP8,
    ],
    ids=["int8", "qat", "stochastic", "static", "delayed"],
)
def test_fit_and_conversion(rule):
    exact = fit(compiled(convnet()))
    model = fewbit.quantize_model(convnet(), QtProvider([rule]))
    assert [type(layer).__name__ for layer in model.layers if layer.name in ("conv", "up")] == [
        "QTrainConv2D",
        "QTrainDense",
    ]
    losses = fit(compiled(model))
    assert losses[-1] < 0.8 * losses[0] and abs(losses[-1] - exact[-1]) < 0.15
    assert losses != exact
    assert all(v.dtype == "float32" for v in model.trainable_variables)
    trained = model.predict(IMAGES, verbose=0)
    served = fewbit.to_ptq(model, progress=False)
    kind = "QStaticDense" if rule.act_static_scale or rule is FP8 else "QDynamicDense"
    assert served is model and type(model.get_layer("up")).__name__ == kind
    np.testing.assert_allclose(model.predict(IMAGES, verbose=0), trained, atol=2e-4)
    with pytest.raises(ValueError, match="no layer that trains quantized"):
        fewbit.to_ptq(model)
    with pytest.raises(ValueError, match="are stored on few bits"):
        fit(compiled(model), 1)


def test_gradients_are_those_of_quantized_training():
    """One Dense layer against the function-level op."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16, use_bias=False)])
    kernel = model.trainable_variables[0].value
    x = jax.numpy.asarray(RNG.normal(size=(8, 32)).astype("float32"))
    model = fewbit.quantize_model(model, QtProvider([FULL]))

    def loss(values):
        out, _ = model.stateless_call(values, [], x, training=True)
        return jax.numpy.sum(jax.numpy.square(out))

    (g,) = jax.grad(loss)([kernel])
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], QtProvider([FULL]))
    wanted = jax.grad(lambda p: jax.numpy.sum(jax.numpy.square(f(p, x))))({"w": kernel})["w"]
    np.testing.assert_allclose(g, wanted, rtol=1e-5, atol=1e-5)


def test_stochastic_rounding_changes_from_step_to_step():
    rule = FULL.replace(bwd_stochastic_rounding="uniform", bwd_qtype="int4")
    model = compiled(fewbit.quantize_model(convnet(), QtProvider([rule])))
    before = [np.asarray(v.value) for v in model.non_trainable_variables if "seed" in v.path]
    fit(model, 1)
    after = [np.asarray(v.value) for v in model.non_trainable_variables if "seed" in v.path]
    assert before and all((a != b).any() for a, b in zip(before, after, strict=True))


# Keras' own, when it saves an optimizer.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_training_goes_on_after_loading(tmp_path):
    path = tmp_path / "half.keras"
    model = compiled(fewbit.quantize_model(convnet(), QtProvider([FULL])))
    fit(model, 2)
    model.save(path)
    again = keras.saving.load_model(path)
    assert type(again.get_layer("up")).__name__ == "QTrainDense"
    np.testing.assert_array_equal(
        again.predict(IMAGES, verbose=0), model.predict(IMAGES, verbose=0)
    )
    code = (
        "import sys, keras, numpy as np, fewbit.keras\n"
        "model = keras.saving.load_model(sys.argv[1])\n"
        "x, y = np.load(sys.argv[2]), np.load(sys.argv[3])\n"
        "losses = model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False)\n"
        "print(losses.history['loss'][-1])\n"
        "fewbit.to_ptq(model, progress=False).save(sys.argv[4])\n"
    )
    np.save(tmp_path / "x.npy", IMAGES)
    np.save(tmp_path / "y.npy", LABELS)
    files = [path, tmp_path / "x.npy", tmp_path / "y.npy", tmp_path / "served.keras"]
    env = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, files)],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert float(done.stdout.split()[-1]) < fit(model, 3)[-1] + 0.1
    served = keras.saving.load_model(files[-1])
    assert type(served.get_layer("up")).__name__ == "QDynamicDense"


def test_the_plan_and_what_is_refused():
    model = convnet()
    plan = fewbit.plan(model, QtProvider([FULL]))
    rows = {row.site.path: row for row in plan.sites}
    assert rows["net/up" if "net/up" in rows else "up"].drhs == "int8 x int8"
    with pytest.raises(ValueError, match="matches no layer"):
        fewbit.quantize_model(model, QtProvider([FULL.replace(module_path="nowhere")]))
    assert type(model.get_layer("up")).__name__ == "Dense"
    twin = fewbit.quantize_model(model, QtProvider([FULL]), inplace=False)
    assert type(model.get_layer("up")).__name__ == "Dense" and twin is not model


@pytest.mark.parametrize("tile", [1 / 4, 8])
def test_tiles_of_a_batch_whose_size_is_not_known_yet(tile):
    """Layers are planned before they see a batch, from which the tiles are cut."""
    rule = FULL.replace(op_names=("dot_general",), bwd_weight_grad_tile_size=tile)
    model = fewbit.quantize_model(convnet(), QtProvider([rule]))
    rows = {row.site.path.rpartition("/")[2]: row for row in fewbit.plan(model).sites}
    assert rows["up"].drhs == f"int8 x int8 tile {tile}"
    losses = fit(compiled(model), 3)
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match=f"{tile}"):
        model.fit(IMAGES[:18], LABELS[:18], batch_size=9, verbose=0)


def test_learned_scales_are_refused_by_name():
    model = convnet()
    learned = FULL.replace(weight_calibration_method="learned")
    with pytest.raises(ValueError, match=r"net/conv.*trained beside its weight, and Keras layers"):
        fewbit.quantize_model(model, QtProvider([learned]))
    assert type(model.get_layer("up")).__name__ == "Dense"
