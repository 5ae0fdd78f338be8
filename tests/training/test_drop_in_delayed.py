"""Delayed scaling in a single layer: Linen and NNX hold histories, functions take them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from delayed_run import RULE as FP8
from flax import nnx
from flax.training.train_state import TrainState

import fewbit
from fewbit import QtProvider, QtRule
from fewbit.training import DotGeneral, Einsum, dot_general_cls, einsum_cls, rule_histories

OVERWRITTEN = "_overwrite_with_gradient"
NUMBERS = (((1,), (0,)), ((), ()))
SIDES = ("lhs", "rhs", "grad")
LINEN = functools.partial(fewbit.QtDotGeneral, FP8)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, Y = normal(0, 16, 8), normal(1, 16, 4)
STEPS = (1, 2, 4, 0.5, 3)


def trained(model, **fields):
    """A Linen model after a few steps of Flax' own TrainState, on batches of different size."""
    variables = model.init(jax.random.key(2), X)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.05))

    @jax.jit
    def step(state, x):
        loss = lambda variables: jnp.mean(jnp.square(model.apply(variables, x, **fields) - Y))  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for scale in STEPS:
        state = step(state, scale * X)
    return state.params


def test_a_linen_layer_trains_as_a_model_of_the_provider_does():
    mine = trained(nn.Dense(4, dot_general_cls=LINEN))
    whole = trained(fewbit.quantize_model(nn.Dense(4), QtProvider([FP8])))
    np.testing.assert_allclose(
        mine["params"]["kernel"], whole["params"]["kernel"], rtol=1e-6, atol=1e-7
    )
    (own,) = mine[OVERWRITTEN].values()
    assert own.keys() == {f"{side}_amax_history" for side in SIDES}
    for side in SIDES:
        wanted = whole[OVERWRITTEN][f"dot_general0_{side}_amax_history"]
        np.testing.assert_allclose(own[f"{side}_amax_history"], wanted, rtol=1e-6)
    largest = [abs(scale) * float(jnp.abs(X).max()) for scale in reversed(STEPS)][:4]
    np.testing.assert_allclose(own["lhs_amax_history"], largest, rtol=1e-6)


def test_histories_are_a_collection_that_has_to_be_passed():
    layer = nn.Dense(4, dot_general_cls=LINEN)
    variables = layer.init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, variables[OVERWRITTEN]) == {
        "QtDotGeneral_0": {f"{side}_amax_history": (4,) for side in SIDES}
    }
    with pytest.raises(ValueError, match=r"finds no 'lhs_amax_history' .* that init made"):
        layer.apply({"params": variables["params"]}, X)
    longer = fewbit.QtDotGeneral, FP8.replace(act_calibration_method="delayed,8")
    with pytest.raises(ValueError, match=r"'lhs_amax_history': \(8,\)"):
        nn.Dense(4, dot_general_cls=functools.partial(*longer)).apply(variables, X)


def test_layers_of_a_scan():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(8, dot_general_cls=LINEN)(x)), None

    class Tower(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, OVERWRITTEN: 0}
            block = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=3)
            return block(name="layers")(x, None)[0][:, :4]

    variables = trained(Tower())
    ((own,),) = (v.values() for v in variables[OVERWRITTEN]["layers"].values())
    assert own["lhs_amax_history"].shape == (3, 4) and (own["grad_amax_history"] > 0).all()
    largest = 3 * float(jnp.abs(X).max())
    np.testing.assert_allclose(own["lhs_amax_history"][0, 0], largest, rtol=1e-6)
    assert (own["lhs_amax_history"][1:] <= 1).all()  # what tanh gives


def test_the_einsum_twin():
    einsum = fewbit.QtEinsum(FP8)
    w = normal(3, 8, 4)
    variables = einsum.init(jax.random.key(0), "ab,bc->ac", X, w)

    def loss(variables, w):
        return jnp.sum(jnp.square(einsum.apply(variables, "ab,bc->ac", X, w)))

    new, gradient = jax.grad(loss, argnums=(0, 1))(variables, w)
    own = new[OVERWRITTEN]
    assert own["lhs_amax_history"].tolist() == [float(jnp.abs(X).max()), 0, 0, 0]
    assert own["rhs_amax_history"].tolist() == [float(jnp.abs(w).max()), 0, 0, 0]
    exact = jax.grad(lambda w: jnp.sum(jnp.square(X @ w)))(w)
    assert 0 < float(jnp.abs(gradient - exact).mean()) < 0.1 * float(jnp.abs(exact).mean())


def test_noise_and_histories_together():
    noisy = functools.partial(fewbit.QtDotGeneral, FP8.replace(bwd_stochastic_rounding="uniform"))
    layer = nn.Dense(4, dot_general_cls=noisy)
    found = [
        trained(layer, rngs={"stochastic_rounding": jax.random.key(k)})["params"]["kernel"]
        for k in (0, 0, 1)
    ]
    assert (found[0] == found[1]).all() and (found[0] != found[2]).any()


def test_a_layer_called_twice():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(8, dot_general_cls=LINEN)
            return layer(nn.tanh(layer(x)))

    with pytest.raises(ValueError, match="'Dense_0/QtDotGeneral_0' is called more than once"):
        Twice().init(jax.random.key(0), X)
    layer = nnx.Linear(8, 8, dot_general=fewbit.NnxQtDotGeneral(FP8), rngs=nnx.Rngs(0))
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, fewbit.AmaxHistory))
    for _ in range(2):
        loss = nnx.grad(lambda layer: jnp.mean(layer(3 * nnx.tanh(layer(X)))), argnums=wrt)
        new = loss(layer)["dot_general"]["lhs_amax_history"][...]
        layer.dot_general.lhs_amax_history.set_value(new)
    largest = float(max(jnp.abs(X).max(), 3 * jnp.abs(nnx.tanh(layer(X))).max()))
    np.testing.assert_allclose(new, [largest, largest, 0, 0], rtol=0.05)


@pytest.mark.parametrize("kind", ["Linear", "Einsum"])
def test_nnx_layers_hold_their_histories(kind):
    rngs = nnx.Rngs(0)
    if kind == "Linear":
        layer = nnx.Linear(8, 4, dot_general=fewbit.NnxQtDotGeneral(FP8), rngs=rngs)
        held = layer.dot_general
    else:
        einsum = fewbit.NnxQtEinsum(FP8)
        layer = nnx.Einsum("ab,bc->ac", (8, 4), (4,), einsum_op=einsum, rngs=rngs)
        held = layer.einsum_op
    start = jnp.copy(layer.kernel[...])
    wrt = nnx.Any(nnx.Param, fewbit.AmaxHistory)
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    optimizer = nnx.Optimizer(layer, fewbit.training.overwrite_with_gradient(clipped), wrt=wrt)

    @nnx.jit
    def step(layer, optimizer, x):
        loss = lambda layer: jnp.mean(jnp.square(layer(x) - Y))  # noqa: E731
        optimizer.update(layer, nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(layer))

    for scale in STEPS:
        step(layer, optimizer, scale * X)
    largest = [abs(scale) * float(jnp.abs(X).max()) for scale in reversed(STEPS)][:4]
    np.testing.assert_allclose(held.lhs_amax_history[...], largest, rtol=1e-6)
    assert (held.grad_amax_history[...] > 1e-3).all()
    moved = float(jnp.linalg.norm(layer.kernel[...] - start))
    assert 0 < moved < 1.01e-3 * len(STEPS)


def test_nnx_layers_draw_from_their_stream():
    rule = FP8.replace(bwd_stochastic_rounding="uniform")
    with pytest.raises(ValueError, match="which needs a key"):
        fewbit.NnxQtDotGeneral(rule)
    product = fewbit.NnxQtDotGeneral(rule, rngs=nnx.Rngs(stochastic_rounding=0))
    w = normal(3, 8, 4)
    gradient = nnx.grad(lambda product, w: (product(X, w, NUMBERS) ** 2).sum(), argnums=1)
    a, b = (gradient(product, w) for _ in range(2))
    assert (a != b).any()


def test_a_function_takes_and_gives_histories():
    w, histories = normal(3, 8, 4), rule_histories(FP8)
    f = fewbit.quantize_model(lambda p, x: x @ p["w"], QtProvider([FP8]))
    known = f.init_amax_history({"w": w}, X)
    for scale in STEPS[:3]:
        x = scale * X

        def own(w, histories, x=x):
            return jnp.sum(jnp.square(DotGeneral(FP8, histories=histories)(x, w, NUMBERS)))

        def whole(p, known, x=x):
            return jnp.sum(jnp.square(f(p, x, amax_history=known)))

        gradient, histories = jax.grad(own, argnums=(0, 1))(w, histories)
        wanted, known = jax.grad(whole, argnums=(0, 1))({"w": w}, known)
        np.testing.assert_allclose(gradient, wanted["w"], rtol=1e-6)
    ((_, sides),) = known.items()
    assert sides.keys() == histories.keys()
    for name, value in sides.items():
        np.testing.assert_allclose(histories[name], value, rtol=1e-6)


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: DotGeneral(FP8), "DotGeneral: the rule takes ranges from the steps before"),
        (lambda: Einsum(FP8), "fewbit.NnxQtEinsum. Or hold them yourself: Einsum(rule, "),
        (lambda: dot_general_cls(FP8), "dot_general_cls=functools.partial(fewbit.QtDotGeneral"),
        (lambda: einsum_cls(FP8), "nnx.Linear(dot_general=fewbit.NnxQtDotGeneral(rule))"),
        (
            lambda: DotGeneral(FP8, histories={"lhs_amax_history": jnp.zeros(4)}),
            "got amax histories of the shapes {'lhs_amax_history': (4,)}, but its rule needs",
        ),
        (
            lambda: DotGeneral(QtRule(weight_qtype="int8"), histories=rule_histories(FP8)),
            "but its rule needs {}",
        ),
    ],
)
def test_what_keeps_nothing_says_what_does(make, sentence):
    with pytest.raises(ValueError) as error:
        make()
    assert sentence in str(error.value)
