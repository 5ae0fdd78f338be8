"""What Keras layers remember of their training: ranges for static scales, amax histories."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import keras_remembering
import numpy as np
import pytest
from keras_remembering import BATCHES, DELAYED, STATIC, X, Y, fit, net, remembered

import fewbit
import fewbit.keras
from fewbit import QtProvider

LHS, RHS, GRAD = (f"dot_general0_{side}_amax_history" for side in ("lhs", "rhs", "grad"))


def maxima():
    """The largest input of each batch, the latest first."""
    return [np.abs(X[batch]).max() for batch in reversed(BATCHES)]


def reference(rule, steps):
    """The same two layers as a function, trained by hand: parameters, ranges or histories."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4), keras.layers.Dense(2)]
    keras.Sequential([keras.Input((8,)), *layers])
    values = [v.value for layer in layers for v in layer.variables]
    params = dict(zip(("w1", "b1", "w2", "b2"), values, strict=True))

    def two(params, x):
        return (x @ params["w1"] + params["b1"][None]) @ params["w2"] + params["b2"][None]

    f = fewbit.quantize_model(two, QtProvider([rule.replace(act_batch_axes=(0, 1))]))
    state = f.init_amax_history(params, X[:8]) if rule is DELAYED else {}

    @jax.jit
    def step(params, state, x, y):
        def loss(params, state):
            if rule is DELAYED:
                return jnp.mean(jnp.square(f(params, x, amax_history=state) - y)), state
            out, state = f.collecting(params, state, x)
            return jnp.mean(jnp.square(out - y)), state

        if rule is DELAYED:
            (grads, new), _ = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, state)
        else:
            grads, new = jax.grad(loss, has_aux=True)(params, state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new

    for k in range(steps):
        batch = BATCHES[k % len(BATCHES)]
        params, state = step(params, state, X[batch], Y[batch])
    return params, state


@pytest.mark.parametrize("rule", [STATIC, DELAYED], ids=["static", "delayed"])
def test_fit_is_the_function_trained_by_hand(rule):
    model = net(rule)
    fit(model)
    params, state = reference(rule, len(BATCHES))
    for layer, number in zip(model.layers, "12", strict=True):
        np.testing.assert_allclose(layer.kernel, params["w" + number], rtol=1e-5, atol=1e-6)
        (sides,) = [v for name, v in state.items() if name.startswith("w" + number)]
        wanted = (
            {f"dot_general0_{side}": value for side, value in sides.items()}
            if rule is DELAYED
            else {f"dot_general0_lhs_{key}": value for key, value in sides["lhs"].items()}
        )
        found = remembered(layer)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_ranges_count_training_steps_only():
    model = net(STATIC)
    fit(model)
    seen = remembered(model.layers[0])
    assert seen["dot_general0_lhs_count"] == 4
    assert seen["dot_general0_lhs_max_of_absmax"].item() == max(maxima())
    means = [np.abs(X[batch]).max(1).mean() for batch in BATCHES]  # over the rows of a batch
    np.testing.assert_allclose(seen["dot_general0_lhs_sum_of_absmax"].item(), sum(means), 1e-6)
    big = 100 * X
    model.evaluate(big, Y, verbose=0)
    model.predict(big, verbose=0)
    model(big)
    assert remembered(model.layers[0]) == seen
    model(big[:8], training=True)  # without a gradient, as BatchNormalization would
    assert remembered(model.layers[0])["dot_general0_lhs_count"] == 5
    assert not any(v.trainable for v in model.layers[0]._fewbit.remembered.variables.values())


def test_what_serves_has_the_scales_of_training():
    model = net(STATIC)
    fit(model)
    trained = model.predict(X, verbose=0)
    served = fewbit.to_ptq(model, progress=False)
    np.testing.assert_array_equal(served.predict(X, verbose=0), trained)
    np.testing.assert_allclose(
        np.unique(served.layers[0].a_scale), max(maxima()) / 127.5, rtol=1e-6
    )
    names = [v.name for v in served.layers[0].variables]
    assert "dot_general0_lhs_scale" in names and not any("count" in name for name in names)


def test_delayed_scales_serve_as_they_ended():
    model = net(DELAYED)
    fit(model)
    history = remembered(model.layers[0])
    trained = model.predict(X, verbose=0)
    served = fewbit.to_ptq(model, progress=False)
    np.testing.assert_array_equal(served.predict(X, verbose=0), trained)
    layer = served.layers[0]
    np.testing.assert_allclose(np.unique(layer.a_scale), history[LHS].max() / 448, rtol=1e-6)
    np.testing.assert_allclose(np.unique(layer.w_scale), history[RHS].max() / 448, rtol=1e-6)
    assert not any(v.overwrite_with_gradient for v in served.variables)


def test_a_new_calibration_takes_the_place_of_ranges():
    model = net(DELAYED)
    fit(model)
    weights = remembered(model.layers[0])[RHS].max()
    served = fewbit.to_ptq(model, [10 * X], progress=False)
    scale = np.unique(served.layers[0].a_scale)
    np.testing.assert_allclose(scale, 10 * max(maxima()) / 448, rtol=1e-6)
    np.testing.assert_allclose(np.unique(served.layers[0].w_scale), weights / 448, rtol=1e-6)


# Keras' own, when it saves an optimizer.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_training_goes_on_in_another_process(tmp_path):
    models, paths = [], []
    for rule in (STATIC, DELAYED):
        models.append(net(rule, keras.optimizers.Adam(0.01)))
        fit(models[-1])
        paths.append(str(tmp_path / f"{len(paths)}.keras"))
        models[-1].save(paths[-1])
    env = {**os.environ, "KERAS_BACKEND": "jax"}
    subprocess.run(
        [sys.executable, keras_remembering.__file__, *paths],
        env=env,
        check=True,
        capture_output=True,
    )
    for model, path in zip(models, paths, strict=True):
        losses = fit(model, 2)
        there = np.load(path + ".npz")
        np.testing.assert_allclose(there["losses"], losses, rtol=1e-6)
        for layer in model.layers:
            for name, value in remembered(layer).items():
                np.testing.assert_allclose(there[f"{layer.name}.{name}"], value, rtol=1e-5)
        np.testing.assert_array_equal(there["served"], there["trained"])
        twin = fewbit.keras.clone_model(model)
        for mine, other in zip(model.layers, twin.layers, strict=True):
            assert remembered(mine).keys() == remembered(other).keys() != set()
            assert all((remembered(other)[n] == v).all() for n, v in remembered(mine).items())


@pytest.mark.parametrize(
    "options",
    [dict(clipnorm=1e-3), dict(global_clipnorm=1e-3), dict(clipvalue=1e-3)],
    ids=lambda options: next(iter(options)),
)
def test_clipping_leaves_histories_alone(options):
    model = net(DELAYED, keras.optimizers.SGD(1.0, weight_decay=0.1, **options))
    one = model.layers[0]
    before = np.asarray(one.kernel)
    fit(model)
    history = remembered(one)
    assert history[LHS].tolist() == maxima()
    np.testing.assert_allclose(history[RHS][-1], np.abs(before).max(), rtol=1e-6)
    assert (history[GRAD] > 1e-3).all()  # beyond the clipped norm, and still as they were
    moved = np.abs(np.asarray(one.kernel) - before * 0.9**4).max()
    assert 0 < moved < 4.1e-3 * 4


def test_accumulated_gradients_merge_histories_by_maximum():
    steps = dict(gradient_accumulation_steps=2)
    model = net(DELAYED, keras.optimizers.SGD(0.1, **steps, global_clipnorm=1.0))
    kernel = np.abs(model.layers[0].kernel).max()
    fit(model)
    latest = maxima()
    wanted = [max(latest[:2]), max(latest[2:]), 0, 0]
    found = remembered(model.layers[0])
    assert found[LHS].tolist() == wanted
    np.testing.assert_allclose(found[RHS][1:], [kernel, 0, 0], rtol=1e-6)  # one per update
    assert (found[GRAD] > 0).tolist() == [True, True, False, False]


def test_a_layer_called_twice_in_a_step():
    keras.utils.set_random_seed(0)
    x, shared = keras.Input((8,)), keras.layers.Dense(8, name="shared")
    out = keras.layers.Dense(2)(shared(3 * shared(x)))
    model = keras.Model(x, out)
    inner = 3 * np.asarray(shared(X[:8]))
    twins = [fewbit.keras.clone_model(model) for _ in range(2)]
    for twin, rule in zip(twins, (DELAYED, STATIC), strict=True):
        fewbit.quantize_model(twin, QtProvider([rule])).compile("sgd", "mse")
        twin.train_on_batch(X[:8], Y[:8])
    delayed, static = (remembered(twin.get_layer("shared")) for twin in twins)
    largest = max(np.abs(X[:8]).max(), np.abs(inner).max())
    np.testing.assert_allclose(delayed[LHS], [largest, 0, 0, 0], rtol=0.1)
    np.testing.assert_allclose(delayed[RHS][0], np.abs(shared.kernel).max(), rtol=1e-6)
    assert static["dot_general0_lhs_count"] == 2
    np.testing.assert_allclose(static["dot_general0_lhs_max_of_absmax"].item(), largest, rtol=0.1)


def test_an_optimizer_that_was_there_goes_on():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    fit(model)
    before = {v.path: np.asarray(v.value) for v in model.optimizer.variables}
    model = fewbit.quantize_model(model, QtProvider([DELAYED]))
    after = {v.path: np.asarray(v.value) for v in model.optimizer.variables}
    assert before.keys() == after.keys()
    assert all((after[path] == value).all() for path, value in before.items())
    fit(model)
    assert (remembered(model.layers[0])[LHS] == maxima()).all()
    assert int(model.optimizer.iterations) == 8


def test_a_frozen_layer_keeps_its_history():
    model = net(DELAYED)
    fit(model)
    before = remembered(model.layers[0])
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    fit(model)
    after = remembered(model.layers[0])
    assert all((after[name] == value).all() for name, value in before.items())


def recurrent(kind, rule, **options):
    keras.utils.set_random_seed(0)
    layer = getattr(keras.layers, kind)(4, name="steps", **options)
    model = keras.Sequential([keras.Input((3, 8)), layer, keras.layers.Dense(2)])
    model = fewbit.quantize_model(model, QtProvider([rule]))
    model.compile("sgd", "mse")
    model.train_on_batch(X[:24].reshape(8, 3, 8), Y[:8])
    return model.get_layer("steps").cell


def test_recurrent_layers_in_loops_are_refused():
    with pytest.raises(ValueError, match=r"what act_static_scale=True remembers .*unroll=True"):
        recurrent("LSTM", STATIC)
    with pytest.raises(ValueError, match="what 'delayed' remembers cannot come out"):
        recurrent("GRU", DELAYED)


def test_recurrent_layers_step_by_step():
    seen = remembered(recurrent("GRU", STATIC, unroll=True))
    assert seen["dot_general0_lhs_count"] == 3
    seen = remembered(recurrent("LSTM", DELAYED, unroll=True))
    assert seen[LHS].tolist() == [np.abs(X[:24]).max(), 0, 0, 0]


def test_a_recurrent_layer_trains_through_its_quantized_cell():
    def outputs(rule):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4, 8)), keras.layers.GRU(4)])
        if rule is not None:
            model = fewbit.quantize_model(model, QtProvider([rule]))
        return np.asarray(model(X.reshape(8, 4, 8)))

    coarse = STATIC.replace(act_static_scale=None, weight_qtype="int4", act_qtype="int4")
    error = np.abs(outputs(coarse) - outputs(None)).max()
    assert 1e-3 < error < 0.5


def test_what_is_refused_leaves_the_model_as_it_was():
    model = net(STATIC)
    with pytest.raises(ValueError, match="No training step has reached 'net/one'"):
        fewbit.to_ptq(model)
    fit(model)
    seen = remembered(model.layers[0])
    with pytest.raises(ValueError, match="matches no layer"):
        fewbit.to_ptq(model, rules=[STATIC.replace(module_path="nowhere")])
    with pytest.raises(ValueError, match="Calibration function must be provided"):
        fewbit.to_ptq(model, rules=[STATIC])
    assert type(model.layers[0]).__name__ == "QTrainDense"
    fit(model)
    after = remembered(model.layers[0])
    assert after["dot_general0_lhs_count"] == 2 * seen["dot_general0_lhs_count"]


def test_a_model_that_does_not_pass_training_on():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = Own()
    model(X)
    model = fewbit.quantize_model(model, QtProvider([STATIC]))
    model.compile("sgd", "mse")
    model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match=r"must take `training`, or Keras does not tell"):
        fewbit.to_ptq(model)


def test_averages_that_keras_cannot_overwrite():
    model = net(DELAYED, keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))
    with pytest.raises(ValueError, match=r"ema_overwrite_frequency=2 .*Leave ema_overwrite"):
        fit(model)
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    fit(model)
    assert remembered(model.layers[0])[LHS].tolist() == maxima()


def test_layers_that_are_computed_again():
    def scoped(rule):
        with keras.RematScope(mode="full"):
            layer = keras.layers.Dense(2, name="again")
        model = keras.Sequential([keras.Input((8,)), layer])
        model = fewbit.quantize_model(model, QtProvider([rule]))
        model.compile("sgd", "mse")
        fit(model)
        return remembered(layer)

    with pytest.raises(ValueError, match="computed again in the backward pass"):
        scoped(STATIC)
    assert scoped(DELAYED)[LHS].tolist() == maxima()


def test_inputs_of_another_rank():
    """One range for a whole operand has no rank."""
    model = net(STATIC)
    out = model.layers[0](np.ones((2, 3, 8), "float32"), training=True)
    assert out.shape == (2, 3, *model.layers[0].output.shape[1:])


@pytest.mark.parametrize("rule", [STATIC, DELAYED], ids=["static", "delayed"])
def test_the_plan_tells_of_parameters_only(rule):
    model = net(rule)
    plan = fewbit.plan(model)
    assert [leaf.path for leaf in plan.leaves] == [
        f"net/{layer}/{name}" for layer in ("one", "two") for name in ("kernel", "bias")
    ]
    assert len(plan.sites) == 2 and all(site.quantized for site in plan.sites)


def test_mixed_precision():
    keras.utils.set_random_seed(0)
    policy = keras.DTypePolicy("mixed_float16")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, dtype=policy)])
    model = fewbit.quantize_model(model, QtProvider([DELAYED]))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64)
    model.compile(optimizer, "mse")
    losses = fit(model) + fit(model)
    assert losses[1] < losses[0]
    history = remembered(model.layers[0])
    assert all(value.dtype == np.float32 for value in history.values())
    np.testing.assert_allclose(history[LHS], maxima(), rtol=1e-3)
    assert (history[GRAD] > 1).all()  # of the scaled loss, as they are rounded
    trained = model.predict(X, verbose=0)
    served = fewbit.to_ptq(model, progress=False).predict(X, verbose=0)
    np.testing.assert_array_equal(served, trained)
